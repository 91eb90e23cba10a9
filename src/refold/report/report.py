"""The report as a person sees it: text, a page, a file."""

from __future__ import annotations

from html import escape
from os import PathLike
from pathlib import Path

from . import page, text
from .model import Contents


class Report(Contents):
    """What happened in the compiles of one callable; ``print`` shows it as text, a notebook as a page."""

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report to a file: as a page if its name ends in ``.html`` or ``.htm``, else as JSON.

        The JSON can be read as a plan: ``refold.compile(f, plan=path)``.
        """
        is_page = Path(path).suffix.lower() in (".html", ".htm")
        Path(path).write_text(self.to_html() if is_page else self.to_json() + "\n", encoding="utf-8")

    def to_html(self) -> str:
        """Return the report as one page that needs nothing else: no network, no scripts."""
        return page.render(self)

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in a frame of its own."""
        return f'<iframe srcdoc="{escape(self.to_html())}" style="width:100%;height:42rem;border:0"></iframe>'

    def __str__(self) -> str:
        return text.render(self)
