"""Is the candidate right, and is it faster? Works on callables, and knows nothing of compilers.

`check` compares a candidate with the original, both against float64. `race` times two callables in turns, and accepts
the candidate only if it is faster beyond noise. Both are for trusted programs, in this process. `judge`, of
`refold.judge`, tries an untrusted program, in a process of its own. docs/verification.md says what each of them shows,
and what it does not show.
"""

from .numerics import MOVES as MOVES
from .numerics import Errors as Errors
from .numerics import Evidence as Evidence
from .numerics import Function as Function
from .numerics import KindResult as KindResult
from .numerics import agree as agree
from .numerics import check as check
from .numerics import moved as moved
from .numerics import narrow_errors as narrow_errors
from .numerics import own_errors as own_errors
from .numerics import roundoff as roundoff
from .timing import Timing as Timing
from .timing import median_ms as median_ms
from .timing import race as race
