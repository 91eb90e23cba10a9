"""Exhaustive tests are due when what they guard has changed, and only then."""

import ast
import importlib.util

from null.source import ROOT, tree

spec = importlib.util.spec_from_file_location("exhaustive", ROOT / "tools" / "exhaustive.py")
exhaustive = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exhaustive)


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
