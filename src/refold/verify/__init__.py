"""Is the candidate right, and is it faster? Takes callables and knows nothing of compilers.

`check` compares a candidate with the original against float64; `race` times two callables
interleaved and accepts only what is faster beyond noise. Level "quick" of the protocol runs inside
the process at each compile; docs/verification.md lists what it does and does not establish.
"""

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
