"""Exhaustive and slow tests are due when what they guard has changed, and only then."""

import ast
from types import SimpleNamespace

from null.source import ROOT, tree
from support.slow import exhaustive, mark_slow


def test_every_folder_exists():
    for name in exhaustive.GROUPS:
        assert all((ROOT / folder).exists() for folder in exhaustive.guarded(name))


def imported(path):
    """Yield the files and folders below the source that a test file imports, itself or through tests/support."""
    for node in ast.walk(tree(path)):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ("support" if node.level else "", node.module)))
            names = [base, *(f"{base}.{one.name}" for one in node.names)]
        for name in names:
            parts = name.split(".")
            module = ROOT / ("src" if parts[0] == "refold" else "tests") / "/".join(parts)
            if parts[0] == "refold" and len(parts) > 1:
                yield from (one for one in (module, module.with_suffix(".py")) if one.exists())
            elif parts[0] == "support" and module.with_suffix(".py").exists():
                yield from imported(module.with_suffix(".py"))


def test_a_group_guards_what_its_tests_import():
    words = ("mark.exhaustive", "mark.rows", "support.products", "support.examples")
    groups = {n: tests for n, (tests, _) in exhaustive.GROUPS.items() if n not in exhaustive.ONCE_MORE}
    seen = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if {"gpu", "null"} & {*path.parts} or not any(word in path.read_text() for word in words):
            continue
        (group,) = [n for n, tests in groups.items() if any(path.is_relative_to(ROOT / one) for one in tests)]
        seen.add(group)
        kept = [ROOT / folder for folder in exhaustive.guarded(group)]
        missing = {module for module in imported(path) if not any(module.is_relative_to(one) for one in kept)}
        assert not missing, f"{group} does not guard what {path.name} imports: {missing}"
    assert seen == set(groups)  # pytest fails where it finds no test


def test_a_change_makes_a_group_due(tmp_path, monkeypatch):
    monkeypatch.setattr(exhaustive, "GROUPS", {"one": (("a",), ("b",)), "two": ((), ("c/x.py",))})
    monkeypatch.setattr(exhaustive, "SHARED", ("shared",))
    for folder in ("a", "b", "c", "shared"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text(folder)
    stamps = {name: exhaustive.digest(exhaustive.guarded(name), tmp_path) for name in exhaustive.GROUPS}
    assert exhaustive.due(stamps, tmp_path) == []
    (tmp_path / "c" / "x.txt").write_text("not a program")
    assert exhaustive.due(stamps, tmp_path) == []
    (tmp_path / "b" / "x.py").write_text("changed")
    assert exhaustive.due(stamps, tmp_path) == ["one"]
    (tmp_path / "b" / "x.py").write_text("b")
    (tmp_path / "b" / "x.py").rename(tmp_path / "b" / "y.py")
    assert exhaustive.due(stamps, tmp_path) == ["one"]
    (tmp_path / "c" / "x.py").write_text("changed")
    assert exhaustive.due(stamps, tmp_path) == ["one", "two"]
    (tmp_path / "b" / "y.py").rename(tmp_path / "b" / "x.py")
    (tmp_path / "c" / "x.py").write_text("c")
    (tmp_path / "shared" / "x.py").write_text("changed")
    assert exhaustive.due(stamps, tmp_path) == ["one", "two"]
    assert exhaustive.due({}, tmp_path) == ["one", "two"]


def test_slow_tests_exist():
    for test in exhaustive.slow():
        file, _, name = test.partition("[")[0].partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), f"{test} is gone: remove its line from tests/slow.json"


def test_slow_tests_are_left_out_where_no_program_has_changed(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "stamps.json").write_text("{}")
    for name, value in {"PROGRAMS": (tmp_path / "a",), "ROOT": tmp_path, "STAMPS": tmp_path / "stamps.json"}.items():
        monkeypatch.setattr(exhaustive, name, value)
    monkeypatch.setattr(exhaustive, "slow", lambda: {"tests/test_x.py::test[1]": 9.0})
    monkeypatch.setattr(exhaustive.digest, "__defaults__", (tmp_path,))

    def marks():
        exhaustive.passed.cache_clear()
        found = {name: [] for name in ("tests/test_x.py::test[1]", "tests/test_x.py::test[2]")}
        mark_slow([SimpleNamespace(nodeid=name, add_marker=own.append) for name, own in found.items()])
        exhaustive.passed.cache_clear()
        return [*found.values()]

    assert marks() == [["slow"], []]
    exhaustive.stamp("slow", exhaustive.PROGRAMS)
    assert marks() == [["slow", "passed"], []]
    (tmp_path / "a" / "x.py").write_text("changed")
    assert marks() == [["slow"], []]


def test_what_took_long_is_stored():
    measured = {
        "tests/cpu/jax/test_x.py::test_a": 5.0,
        "tests/cpu/jax/test_x.py::test_b": 0.1,
        "tests/null/x.py::c": 9.0,
    }
    known = {"tests/cpu/jax/test_x.py::test_b": 4.0, "tests/cpu/jax/test_x.py::test_d": 3.0}
    stored = exhaustive.store_slow(measured, known)
    assert list(stored) == ["tests/cpu/jax/test_x.py::test_a", "tests/cpu/jax/test_x.py::test_d"]
