"""Compare a whole program with the original before it may run: outputs, gradients, and inputs that are written to.

Regions are checked one by one in `refold.compiler.validate.region`. What that cannot see is how they were put together:
a region that was cut out wrongly, a loop whose body is not the user's step, a mistake of Inductor's. So the program
that is about to run is called once on copies of the user's inputs. The original is called on such copies, too, as it is
and in float64. All calls use the same random numbers and the same cotangents. The bound is that of a region
(`refold.verify.numerics`).

Two things differ from a region. A result of a few elements (a loss, say) is one draw of the original's rounding, which
may be small by luck. If only such results fail, or elements that are small next to others, the original is also run on
inputs that are moved by at most one rounding, of the 16-bit type under autocast. Then the largest error seen is its
error.

The original cannot always be run in float64: memory may be too small, or an operation may not support float64. Where
memory is too small, and all results have 16 bits, float32 is exact enough. Else the original is its own reference, and
its error is how far such inputs move it. Nor can it always be run as it is, or as Inductor compiles it. Then it runs
operation by operation, and large products that are only summed are multiplied and summed in blocks.
Design decision 18.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule

from ...verify import MOVES, Errors, KindResult, agree, moved, narrow_errors, own_errors, roundoff
from ...verify.numerics import in_strides
from ..inductor import Compiled, arguments, clone_inputs
from ..ir.dispatch import SINGLE, Impossible, NoRoom, Random, Recording, in_dtype
from ..ir.evaluate import WIDER
from ..ir.fx import HALF

# A result of fewer elements than these may have a small error by luck.
FEW = 64
SEED = 0

Results = dict[str, torch.Tensor]


@dataclass
class Comparison:
    """How a program compares with the original.

    Attributes:
        results: One entry for each result that was compared.
        against: What the reference was: ``float64``, ``float32``, ``the original``, or nothing if memory allowed none.
        note: Why it was not float64.
        difference: Largest relative L2 difference from the original.
    """

    results: list[KindResult] = field(default_factory=list)
    against: str = "float64"
    note: str = ""
    difference: float = 0.0

    @property
    def worst(self) -> KindResult | None:
        """The first result that fails, else the one nearest to its bound."""
        return min(self.results, key=lambda one: (one.passed, -one.error / (one.bound or 1.0)), default=None)

    @property
    def reason(self) -> str:
        """What is beyond its bound; empty if nothing is."""
        return "; ".join(f"{one.kind}: {one.reason}" for one in self.results if not one.passed)


def compare(
    program: Compiled, original: Compiled, own: Compiled | None, inputs: Sequence[Any], terms: int,
    repeatable: Callable[[], Compiled] | None = None, control: Callable[[], Compiled] | None = None,
) -> Comparison:  # fmt: skip
    """Compare a program with the original on copies of the inputs.

    Args:
        program: The program that is about to run.
        original: What it stands for, a program that runs operation by operation.
        own: The original as it can be run in its own dtypes: itself, or compiled; None if memory allows neither, and
            Inductor cannot compile it.
        inputs: The values that the original was captured with.
        terms: Number of terms in the longest sum that was rewritten.
        repeatable: Makes a version of the program that draws the same random numbers as the original; called only if
            that draws any.
        control: Compiles the original so, without rewrites. What differs from the original there as well cannot be
            compared: when a checkpoint recomputes, Inductor draws other numbers.

    Returns:
        The comparison. ``reason`` is empty if the program may run.
    """
    found = Comparison()
    draws: Sequence[torch.Tensor] = ()
    reference = mine = None
    try:
        try:
            found.against, reference = _exact(original, inputs)
        except Random:
            with Recording() as recording:
                mine = _observe(original, inputs)
            draws, program = recording.draws, program if repeatable is None else repeatable()
            found.against, reference = _exact(original, inputs, draws)
    except Exception as error:  # what is not made for float64 has no common error
        found.against, found.note = "the original", str(error).partition("\n")[0] or type(error).__name__
    observe = None if own is None else functools.partial(_observe, own)
    if mine is None and observe is not None:
        mine = observe(inputs)
    elif mine is None:
        observe = functools.partial(_observe, original, as_it_is=False)
        with contextlib.suppress(Impossible, torch.OutOfMemoryError):
            mine = observe(inputs)
    if reference is None and mine is None:
        found.against = ""
        return found
    try:
        got = _observe(program, inputs)
    except RuntimeError as error:  # the original just ran on the same inputs
        reason = f"it fails: {str(error).partition(chr(10))[0]}"
        found.results = [KindResult("the program", False, 0.0, 0.0, 0.0, 0.0, reason)]
        return found
    if found.against == "float32" and any(y.is_floating_point() and y.dtype not in HALF for y in got.values()):
        found.against, found.note = "the original" if mine else "", "in float64 it does not fit in memory"
        reference = None
        if mine is None:
            return found
    known: dict[str, Errors] = defaultdict(Errors)
    least = _autocast(original)
    if reference is None:
        reference = mine
        _add_moved(known, reference, observe, inputs, least)
    elif any(y.dtype == torch.float64 for y in got.values()):
        _add_narrow(known, original, inputs, draws)
    found.results = _judge(reference, mine, got, inputs, terms, known)
    failed = [one.kind for one in found.results if not one.passed]
    if failed and mine is not None and observe is not None and reference is not mine:
        as_a_whole = _judge(reference, mine, got, inputs, terms, known, parts=False)
        if all(one.passed or (one.kind in got and got[one.kind].numel() < FEW) for one in as_a_whole):
            _add_moved(known, reference, observe, inputs, least)
            found.results = _judge(reference, mine, got, inputs, terms, known)
    if failed and draws and control is not None:
        _drop_incomparable(found, _judge(reference, mine, _observe(control(), inputs), inputs, terms, known))
    if mine is not None:
        alike = (own_errors(mine[k], y).e2 for k, y in got.items() if k in mine and y.is_floating_point())
        found.difference = max(alike, default=0.0)
    return found


def _exact(original: Compiled, inputs: Sequence[Any], draws: Sequence[torch.Tensor] = ()) -> tuple[str, Results]:
    """Run the original in float64, or in float32 if memory is too small for that and all inputs have 16 bits."""
    try:
        return "float64", _observe(original, inputs, torch.float64, draws)
    except (NoRoom, torch.OutOfMemoryError):
        if any(x.dtype not in HALF for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()):
            raise
    gc.collect()  # what the first run left in circles
    return "float32", _observe(original, inputs, torch.float32, draws)


def _drop_incomparable(found: Comparison, control: Sequence[KindResult]) -> None:
    """Leave out what differs without any rewrite as well, because Inductor draws other random numbers."""
    lost = {one.kind for one in control if not one.passed}
    names = [one.kind for one in found.results if not one.passed and one.kind in lost]
    found.results = [one for one in found.results if one.kind not in names]
    if names:
        found.note = f"not compared, for torch.compile draws other random numbers than eager: {', '.join(names)}"


def _judge(
    reference: Any, mine: Results | None, got: Results, inputs: Sequence[Any], terms: int, known: Mapping[str, Errors],
    parts: bool = True,
) -> list[KindResult]:  # fmt: skip
    """Compare result by result. What only one of the programs wrote to is what it was in the others."""
    results = []
    for name in dict.fromkeys([*reference, *(mine or ()), *got]):
        written = name.startswith("input")
        was = inputs[int(name.split()[1])].detach() if written else None
        r, y = reference.get(name, was), got.get(name, was)
        o = r.to(y.dtype) if mine is None and r is not None and y is not None else (mine or {}).get(name, was)
        if r is None or o is None or y is None:
            results.append(KindResult(name, False, 0.0, 0.0, 0.0, 0.0, "not all programs have it"))
        else:
            results.append(agree(name, r, o, y, terms, known[name], parts))
    return results


def _observe(
    run: Compiled, inputs: Sequence[Any], dtype: torch.dtype | None = None, draws: Sequence[torch.Tensor] = (), *,
    as_it_is: bool = True,
) -> Results:  # fmt: skip
    """Call a program on copies of inputs, with its backward; return all that it computes and changes.

    Args:
        run: The program.
        inputs: The inputs.
        dtype: What it computes in; its own dtypes unless given.
        draws: The random numbers that it draws in another dtype.
        as_it_is: Whether it may write out large products in its own dtypes.
    """
    own = [_in_dtype(x, dtype) for x in clone_inputs(inputs)]

    def call() -> Results:
        given = arguments(own, inputs)
        out = run(*given)
        listed = list(out) if isinstance(out, (tuple, list)) else [out]
        outputs = {f"output {i}": y for i, y in enumerate(listed) if isinstance(y, torch.Tensor)}
        results = {name: y.detach().clone() for name, y in outputs.items()}
        for i, (x, was) in enumerate(zip(given, inputs, strict=True)):
            if isinstance(x, torch.Tensor) and not torch.equal(x.detach(), was.detach().to(x.dtype)):
                results[f"input {i}"] = x.detach().clone()
        leaves = {i: x for i, x in enumerate(own) if isinstance(x, torch.Tensor) and x.requires_grad}
        roots = [y for y in outputs.values() if y.requires_grad]
        if torch.is_grad_enabled() and leaves and roots:
            cotangents = [_cotangent(i, y) for i, y in enumerate(roots)]
            gradients = torch.autograd.grad(
                roots, list(leaves.values()), cotangents, allow_unused=True, materialize_grads=True
            )
            results |= {f"gradient of input {i}": g.detach() for i, g in zip(leaves, gradients, strict=True)}
        return results

    torch.manual_seed(SEED)
    return call() if dtype is None and as_it_is else in_dtype(call, dtype, draws)


def _cotangent(index: int, y: torch.Tensor) -> torch.Tensor:
    """Draw what every dtype holds exactly, by NumPy: torch's own draws may be recorded or replayed here."""
    drawn = np.random.default_rng(SEED + index).integers(-4, 5, tuple(y.shape)) / 4
    return torch.from_numpy(np.asarray(drawn)).to(y.device, y.dtype)


def _in_dtype(x: Any, dtype: torch.dtype | None) -> Any:
    into = WIDER if dtype == torch.float64 else SINGLE
    if dtype is None or not isinstance(x, torch.Tensor) or x.dtype not in into:
        return x
    wide = x.detach().to(into[x.dtype])
    wide = in_strides(wide, x.stride()) if 0 in x.stride() else wide  # views of what is expanded rely on that
    return wide.requires_grad_(x.requires_grad)


def _autocast(original: Compiled) -> float:
    """Return the relative error of a rounding to what autocast computes in; zero without autocast.

    A program under it rounds its float32 inputs itself, to 16 bits.
    """
    found = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    for part in original.modules() if isinstance(original, GraphModule) else ():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            if getattr(node.target, "__name__", "") == "_enter_autocast":
                kind, dtype, enabled, *_ = node.args
                found += [dtype or torch.get_autocast_dtype(kind)] if enabled else []
    return max(map(roundoff, found), default=0.0)


def _add_moved(known: dict[str, Errors], reference: Any, observe: Any, inputs: Sequence[Any], least: float) -> None:
    """Add the errors that the original makes on inputs that are moved by at most one rounding."""
    for i in range(MOVES):
        generator = torch.Generator().manual_seed(SEED + 1 + i)
        for name, o in observe([moved(x, generator, least) for x in inputs]).items():
            if o.is_floating_point() and name in reference:
                known[name] |= own_errors(reference[name], o)


def _add_narrow(
    known: dict[str, Errors], original: Compiled, inputs: Sequence[Any], draws: Sequence[torch.Tensor]
) -> None:
    """Add the errors of results in float64, of which the original is its own reference, read off a float32 run."""
    rounded = [
        x.detach().float().double().requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor) and x.dtype == torch.float64
        else x
        for x in inputs
    ]
    try:
        wide = _observe(original, rounded, torch.float64, draws)
        narrow = _observe(original, rounded, torch.float32, draws)
    except Exception:  # what is not made for float32 has no common error; the floor alone holds
        return
    for name in wide.keys() & narrow.keys():
        if wide[name].dtype == torch.float64:
            known[name] |= narrow_errors(wide[name], narrow[name])
