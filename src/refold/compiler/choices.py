"""What may be chosen of a compile from outside: rewrites and their order, backends, chunk sizes, Inductor's knobs.

Choices are data in a closed grammar, like programs in index notation: names of passes, places, backends and numbers.
They change which right program is made, and never what it computes; all checks are made as always.

    {"passes": ["recover contractions", "prefer oneDNN"],
     "skip": ["0:sum_1"],
     "operators": {"ssd": {"backend": "torch", "chunk_size": 32}},
     "inductor": {"max_autotune": true}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.fx import Graph

from ..errors import ArgumentError
from ..ops.backends import BACKENDS
from ..ops.spec import load, operators
from ..ops.torch.registry import OPS
from .pipeline import NAMES

# Knobs of Inductor that change how a program is made, and not what it computes: what each may be.
INDUCTOR: Mapping[str, tuple[Any, ...]] = {
    "max_autotune": (True, False),
    "max_autotune_pointwise": (True, False),
    "coordinate_descent_tuning": (True, False),
    "epilogue_fusion": (True, False),
    "aggressive_fusion": (True, False),
    "split_reductions": (True, False),
    "loop_ordering_after_fusion": (True, False),
    "max_fusion_size": (8, 16, 32, 64, 128),
    "triton.prefer_nd_tiling": (True, False),
    "triton.persistent_reductions": (True, False),
    "triton.cudagraphs": (True, False),
    "cpp.simdlen": (None, 0, 128, 256, 512),
    "cpp.min_chunk_size": (512, 1024, 4096, 16384),
}
_TUNED = ("backend", "chunk_size")


@dataclass(frozen=True)
class Choices:
    """What is chosen.

    Attributes:
        passes: The passes that run, in this order; None for all.
        skip: Places that are not rewritten, as keys of a report's rewrites.
        operators: For each operator its ``backend`` and ``chunk_size``.
        inductor: Options of Inductor, of those in `INDUCTOR`.
    """

    passes: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()
    operators: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    inductor: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the form in JSON."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def read(cls, data: Any) -> Choices:
        """Read choices from JSON-compatible data, also from a stranger's.

        Raises:
            ArgumentError: Something in it is not to be chosen; says what is.
        """
        if isinstance(data, Choices):
            return data
        if data is None:
            return cls()
        known = ("passes", "skip", "operators", "inductor")
        if not isinstance(data, Mapping) or (unknown := data.keys() - set(known)):
            what = ", ".join(map(str, unknown)) if isinstance(data, Mapping) else f"{data!r:.80}"
            raise ArgumentError(f"choices are an object with {', '.join(known)}; not {what}")
        passes = _names(data["passes"], "passes") if data.get("passes") is not None else None
        for name in passes or ():
            if name not in NAMES or (passes or ()).count(name) > 1:
                raise ArgumentError(f"passes must be some of {', '.join(NAMES)}, each once; not {name!r:.80}")
        operators = _mapping(data.get("operators", {}), "operators")
        for name, own in operators.items():
            _check_operator(name, _mapping(own, f"operators.{name}"))
        inductor = _mapping(data.get("inductor", {}), "inductor")
        for name, value in inductor.items():
            if name not in INDUCTOR:
                raise ArgumentError(f"inductor takes the options {', '.join(INDUCTOR)}; not {name!r:.80}")
            if not any(value is one or (type(value) is type(one) and value == one) for one in INDUCTOR[name]):
                raise ArgumentError(f"inductor.{name} must be one of {INDUCTOR[name]}, not {value!r:.80}")
        return cls(
            passes, _names(data.get("skip", ()), "skip"), {k: dict(v) for k, v in operators.items()}, dict(inductor)
        )

    def tune(self, graph: Graph) -> bool:
        """Set backends and chunk sizes of a graph's operators; return whether anything changed."""
        changed = False
        for name, own in self.operators.items():
            for node in graph.find_nodes(op="call_function", target=OPS[name]):
                spec = load(name)
                places = [arg.name for arg in spec.args] + [option.name for option in spec.options] + ["backend"]
                args = list(node.args)
                for option, value in own.items():
                    args[places.index(option)] = value
                if tuple(args) != node.args:
                    node.args, changed = tuple(args), True
        return changed


def _names(value: Any, what: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise ArgumentError(f"{what} must be a list of names, not {value!r:.80}")
    return tuple(value)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{what} must be an object, not {value!r:.80}")
    return value


def tuned_options(name: str) -> list[str]:
    """List what can be chosen of an operator."""
    return ["backend", *(option.name for option in load(name).options if option.name in _TUNED)]


def _check_operator(name: str, own: Mapping[str, Any]) -> None:
    if name not in operators():
        raise ArgumentError(f"operators must be some of {', '.join(operators())}; not {name!r:.80}")
    options = {option.name: option for option in load(name).options}
    for option, value in own.items():
        if option not in tuned_options(name):
            raise ArgumentError(
                f"operators.{name} takes {' and '.join(_TUNED)}, if the operator has them; not {option!r:.40}"
            )
        if option == "backend":
            backends = [backend for backend, framework in BACKENDS.items() if framework == "torch"]
            if value not in backends:
                raise ArgumentError(f"the backend of {name} must be one of {', '.join(backends)}, not {value!r:.80}")
        elif not options[option].check(value):
            raise ArgumentError(f"{option} of {name} must be {options[option].expected}, not {value!r:.80}")
