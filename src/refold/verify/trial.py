"""The earlier name of `refold.judge`, for programs that were written for it."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("refold.judge"), {"terms": "Terms"}.get(name, name))
