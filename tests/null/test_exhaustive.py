"""Exhaustive tests are due when what they guard has changed, and only then."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("exhaustive", ROOT / "tools" / "exhaustive.py")
exhaustive = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exhaustive)


def test_every_folder_exists():
    for tests, guarded in exhaustive.GROUPS.values():
        assert all((ROOT / folder).exists() for folder in (*tests, *guarded))


def test_a_change_makes_a_group_due(tmp_path, monkeypatch):
    monkeypatch.setattr(exhaustive, "GROUPS", {"one": (("tests",), ("a", "b")), "two": (("tests",), ("c/x.py",))})
    for folder in "abc":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text(folder)
    stamps = {name: exhaustive.digest(guarded, tmp_path) for name, (_, guarded) in exhaustive.GROUPS.items()}
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
    assert exhaustive.due({}, tmp_path) == ["one", "two"]
