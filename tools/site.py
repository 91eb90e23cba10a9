"""Pages of the site that are made from something else: the README, and the operators from their specs.

MkDocs calls ``on_config`` and ``on_files``; see https://www.mkdocs.org/user-guide/configuration/#hooks.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from refold.ops.spec import load, operators  # noqa: E402

COPIED = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md",
          "log.md": "benchmarks/LOG.md",
          **{f"log/{p.name}": f"benchmarks/log/{p.name}" for p in (ROOT / "benchmarks/log").iterdir()}}  # fmt: skip
MOVED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "benchmarks/LOG.md": "log.md",
         "../../docs/jax.md": "../jax.md"}  # fmt: skip


def on_config(config: Any) -> Any:
    """List the pages of operators after the page that introduces them."""
    sections = [pages for entry in config["nav"] if isinstance(entry, dict) for pages in entry.values()]
    pages = next(pages for pages in sections if isinstance(pages, list) and "operators.md" in pages)
    pages += [f"operators/{name}.md" for name in operators()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are no files of docs/."""
    from mkdocs.structure.files import File

    for name, source in COPIED.items():
        files.append(File.generated(config, name, content=linked((ROOT / source).read_text())))
    for name in operators():
        files.append(File.generated(config, f"operators/{name}.md", content=operator_page(name)))
    return files


def linked(text: str) -> str:
    """Return a page of the repository's root with links that hold in the site."""

    def move(found: re.Match[str]) -> str:
        path, _, anchor = found[1].partition("#")
        path = MOVED.get(path, path.removeprefix("docs/"))
        return f"]({path}{'#' + anchor if anchor else ''})"

    return re.sub(r"\]\(((?!https?:)[^)]+)\)", move, text)


def operator_page(name: str) -> str:
    """Return the reference of an operator: its docstring, and a table of its arguments from its spec."""
    spec, function = load(name), load(name).public
    rows = ["| argument | axes | dtypes | |", "|---|---|---|---|"]
    for arg in spec.args:
        axes = " or ".join(f"`{axes}`" for axes in arg.axes)
        notes = ", ".join(filter(None, ["optional" * arg.optional, "stays float32 with 16-bit activations" * arg.wide]))
        rows.append(f"| `{arg.name}` | {axes} | {', '.join(arg.dtypes)} | {notes} |")
    rows += ["", "| option | default | |", "|---|---|---|"]
    rows += [f"| `{option.name}` | `{option.default!r}` | {option.expected} |" for option in spec.options]
    rows += ["", "| result | axes |", "|---|---|", *(f"| `{out.name}` | `{out.axes}` |" for out in spec.outputs)]
    text = inspect.cleandoc(function.__doc__ or "")
    return (
        f"# {name}\n\n```text\n{call(name, function)}\n```\n\n{as_markdown(text)}\n\n## From the spec\n\n"
        + "\n".join(rows)
        + "\n\nThe letters are explained in the [glossary](../glossary.md#letters).\n"
    )


def as_markdown(docstring: str) -> str:
    """Return a docstring in Google style as Markdown: sections are headings, entries lists, and examples code."""
    lines, section = [], ""
    for line in docstring.splitlines():
        if re.fullmatch(r"[A-Z][a-z]+:", line):
            section = line[:-1]
            lines += [f"## {section}", ""]
        elif section in ("Args", "Raises") and (entry := re.match(r"    (\w[\w, *]*): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif section in ("Args", "Raises"):
            lines.append(f"  {line.strip()}".rstrip())
        else:
            text = line if section in ("", "Example") else line.removeprefix("    ")
            lines.append(re.sub(r"::$", ":", text).replace("docs/numerics.md", "[numerics.md](../numerics.md)"))
    return "\n".join(lines)


def call(name: str, function: Any) -> str:
    """Return the call of an operator, with the defaults of its options, in lines that fit a page."""
    given = [one.replace(annotation=one.empty) for one in inspect.signature(function).parameters.values()]
    text = str(inspect.Signature(given))[1:-1]
    return f"refold.ops.{name}(\n{textwrap.fill(text, 84, initial_indent='    ', subsequent_indent='    ')}\n)"
