"""The contract that every backend of every operator is held to; used by the tests of all frameworks and devices."""

from refold.ops.testing.contract import CHECKS as CHECKS
from refold.ops.testing.contract import Measurement as Measurement
from refold.ops.testing.contract import check as check
from refold.ops.testing.contract import measure as measure
from refold.ops.testing.frameworks import frame_of as frame_of
from refold.ops.testing.problems import Problem as Problem
from refold.ops.testing.problems import problem as problem

__all__ = ["CHECKS", "Measurement", "Problem", "check", "frame_of", "measure", "problem"]
