"""The signatures of engines that were recorded, by version."""

import re
from pathlib import Path

SIGNATURES = Path(__file__).parents[1] / "cpu" / "engines" / "signatures"


def recorded(engine, version):
    """Return by place (module:path) the parameters that a version of an engine has there."""
    text = (SIGNATURES / f"{engine}-{version}.txt").read_text()
    return dict(re.fullmatch(r"(\S+?)\((.*)\)", line).groups() for line in text.splitlines())
