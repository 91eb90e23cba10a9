"""The entry points: ``torch.compile(backend="refold")``, `refold.compile` and `refold.explain`.

They are those of `refold.compiler.engine`. With a PyTorch that lacks a name which the compiler cannot do without, they
are those of `refold.compiler.without`: Inductor compiles graphs as they are, with one warning. Design decision 30.
"""

from __future__ import annotations

from typing import Any

import torch

from ..versions import lose

_entries: Any
try:
    from . import engine as _entries
except (ImportError, AttributeError) as error:
    from . import without as _entries

    _entries.reason = f"PyTorch {torch.__version__} is not as expected ({type(error).__name__}: {error})"
    lose("refold rewrites nothing", _entries.reason)

refold, compile, explain = _entries.refold, _entries.compile, _entries.explain
