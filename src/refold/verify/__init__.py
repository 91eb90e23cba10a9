"""Is the candidate right, and is it faster? Takes callables and files and knows nothing of compilers.

`check` compares a candidate with the original against float64; `race` times two callables
interleaved and accepts only what is faster beyond noise: both for programs that are trusted, in this process. `judge`
tries a program that is not, in one of its own. docs/verification.md lists what each does and does not establish.
"""

from typing import Any

from .numerics import Evidence as Evidence
from .numerics import KindResult as KindResult
from .numerics import Program as Program
from .numerics import agree as agree
from .numerics import check as check
from .numerics import narrow_errors as narrow_errors
from .numerics import own_errors as own_errors
from .numerics import unit_roundoff as unit_roundoff
from .timing import Race as Race
from .timing import median_ms as median_ms
from .timing import race as race


def __getattr__(name: str) -> Any:
    """Import the trial of untrusted programs when it is first asked for; it needs Linux."""
    if name not in ("judge", "Verdict"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import trial

    return getattr(trial, name)
