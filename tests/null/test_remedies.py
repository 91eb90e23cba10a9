"""What refold tells people to do names things that exist: extras, commands, options, variables, functions."""

import ast
import functools
import inspect
import re
import tomllib
from importlib import import_module

import pytest

import refold
from null.source import ROOT, files, tree
from refold.compiler.refusals import REASONS

torch = pytest.importorskip("torch")

SOURCES = files("src")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def texts(program):
    """Yield the strings of a program that are more than one word, and no docstrings; ``{}`` stands for what varies."""
    skipped = set()
    for node in ast.walk(program):  # what holds a string comes before it
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if node.body and isinstance(node.body[0], ast.Expr):
                skipped.add(node.body[0].value)
        elif isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
            yield "".join(str(x.value) if isinstance(x, ast.Constant) else "{}" for x in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.value


@functools.cache
def said():
    return [(path.name, text) for path in SOURCES for text in texts(tree(path)) if " " in text]


def extras(text):
    return set(re.findall(r"\brefold\[([a-z]+)\]", text))


def dotted(text):
    """Return the functions of torch and of refold that a text names, but not files, and modules to be told of."""
    return set(re.findall(r"(?<![\w/.])(?:torch|refold)(?:\.[A-Za-z_]\w*)+(?![\w/])", text))


def exists(name):
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:size]))
        except ImportError:
            continue
        try:
            for part in parts[size:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


def options():
    """Return the options and the commands of the command line."""
    from typer.main import get_command

    from refold.bench.cli import app as bench  # the command line loads it when it is asked for
    from refold.cli import app

    names, commands, stack = {"--help"}, set(), [get_command(app), get_command(bench)]
    while stack:
        command = stack.pop()
        commands.add(command.name)
        names |= {text for one in command.params for text in (*one.opts, *one.secondary_opts)}
        stack += getattr(command, "commands", {}).values()
    return names, commands


def test_extras_exist():
    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    told = [(file, extra) for file, text in said() for extra in extras(text)]
    told += [(page.name, extra) for page in PAGES for extra in extras(page.read_text())]
    assert len(told) > 5
    assert {one for one in told if one[1] not in known} == set()


def test_functions_exist():
    spared = {"refold.graphs", "refold.engines.torchtitan.gated_delta_rule"}  # a logger; what imports torchtitan
    told = {(file, name) for file, text in said() for name in dotted(text) - spared}
    assert len(told) > 20
    assert {one for one in told if not exists(one[1])} == set()


@pytest.mark.slow
def test_options_and_commands_exist():
    names, commands = options()
    told = [(file, option) for file, text in said() for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)]
    assert len(told) > 10
    assert {one for one in told if one[1] not in names | FOREIGN} == set()
    told = [(file, word) for file, text in said() for word in re.findall(r"`refold ([a-z]+)", text)]
    assert told
    assert {one for one in told if one[1] not in commands} == set()


FOREIGN = {"--xla", "--linear-attn-backend", "--mamba-radix-cache-strategy", "--override"}
"""Options of other programs."""


def test_variables_are_read():
    read = "\n".join(path.read_text() for path in (*SOURCES, *(ROOT / "tests").rglob("*.py")))
    told = {name for _, text in said() for name in re.findall(r"\bREFOLD_[A-Z_]+", text)}
    told |= {name for page in PAGES for name in re.findall(r"\bREFOLD_[A-Z_]+", page.read_text())}
    constants = set(re.findall(r"\"(REFOLD_[A-Z_]+)\"", read))
    assert told
    assert told <= constants


def test_arguments_in_remedies_exist():
    known = set(inspect.signature(refold.compile).parameters)
    told = {name for _, remedy in REASONS.values() for name in re.findall(r"\b([a-z_]+)=[\"TF]", remedy)}
    assert {"accept", "verify", "dynamic"} <= told
    assert told <= known
    assert "compile_budget" in known


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pip install 'refold[gpu]'", {"gpu"}),
        ("Use torch.no_such_function(x).", {"torch.no_such_function"}),
        ("call refold.accelarate(model)", {"refold.accelarate"}),
    ],
)
def test_what_does_not_exist_is_found(text, found):
    (read,) = texts(ast.parse(f"x = {text!r}"))
    assert extras(read) | {name for name in dotted(read) if not exists(name)} == found
