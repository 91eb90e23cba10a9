"""Engines that are not installed: packages written from the signatures that were recorded of a version."""

import importlib
import sys

import pytest


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Write a package of modules with a version; what this process imported of it is forgotten after the test."""

    def write(name, version, modules):
        for module, source in modules.items():
            file = tmp_path.joinpath(*module.split("."))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.with_suffix(".py").write_text(source)
        for folder in {parent for file in tmp_path.rglob("*.py") for parent in file.parents if parent > tmp_path}:
            (folder / "__init__.py").touch()
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()

    before = set(sys.modules)
    yield write
    for module in set(sys.modules) - before:
        if module.split(".")[0] in ("vllm", "sglang", "torchtitan"):
            del sys.modules[module]
