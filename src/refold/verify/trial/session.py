"""The programs of a trial in their processes: how they are started, given the same, called and compared.

Seeds are drawn after the candidate is loaded, and are written down only after its process has ended. The judge runs no
code of the programs.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import numerics
from . import inputs
from .process import GUARD, Call, Misbehaved, Nursery, Result, Unjudgeable, Worker
from .program import Program
from .results import contiguous, identical, judged, strides, unlike
from .sandbox import enough
from .terms import LEVELS, Terms
from .verdict import Verdict

Tensors = Sequence[torch.Tensor]
GRADIENTS = "torch.fx.experimental.symbolic_shapes"  # which torch.autograd.grad imports


class Refused(Exception):
    """A check decided."""


class Session:
    """One candidate beside its original; the checks of what a call returns and leaves."""

    def __init__(
        self,
        original: Program,
        candidate: Program,
        given: Tensors | None,
        terms: Terms,
        nursery: Nursery,
        *,
        seed: int | None = None,
        off: frozenset[str] = frozenset(),
    ):
        self.original, self.candidate, self.given, self.terms, self.nursery = original, candidate, given, terms, nursery
        self.level = LEVELS[terms.level]
        self.off = off
        self.verdict = Verdict(original, candidate, terms, off=sorted(off))
        self._seed = seed
        self._secret = b""
        self._shares_state = False
        self._aliases: list[Any] = []  # what the original's results share memory with
        self._kept: Result  # of the candidate, alive until the trial ends
        self._longest = 1
        self._known = numerics.NOTHING
        self._usual: tuple[float, list[float]] | None = None  # norms of zero-mean inputs and of their gradients
        self._lucky = False  # whether a result was excused, since the original's own was right by luck
        self._state: dict[str, torch.Tensor] = {}  # parameters and buffers that all sides begin with
        self._given_state = self._state  # what they were given last
        self._past: deque[Result] = deque(maxlen=8)
        self._random = False
        self._compiled: Worker | None = None
        self._places_of: dict[Worker, dict[str, dict[str, Any]]] = {}  # of the weights of the two that are timed
        self._now: dict[str, torch.Tensor] = {}  # these weights
        self._odd: dict[int, str] = {}  # which of the first timed calls have inputs of another kind
        self._fresh: set[int] = set()  # and which have changed weights
        self._most = 1 << 20
        self._began = time.perf_counter()
        self._outputs: list[tuple[list[int], torch.dtype]] = []  # shape and dtype of each result, without gradients
        self._stateful = False  # whether the original changes its buffers
        self._constant: set[str] = set()  # parameters and buffers that it leaves alone

    def _open(self, stack: contextlib.ExitStack) -> None:
        terms = self.terms
        self.nursery.imports = [GRADIENTS] if terms.train else []
        texts = self.candidate.text + self.original.text
        if "torch.compile" in texts and "triton" not in texts:  # which is told before it is imported how to run
            self.nursery = self.nursery.other(compiler=True)

        def start(program: Program, name: str, room: int) -> Worker:
            return stack.enter_context(self.nursery.program(program.text, name, room=room))

        self.giver = start(self.original, "original.py", 1 << 16)
        self.verdict.sandbox = self.giver.active
        for text in self.giver.unseen:
            self.verdict.note(text)
        if self.nursery.sandboxed and (missing := enough(self.giver.active)):
            raise Unjudgeable(
                f"there is no sandbox to run it in: {missing}. --allow-unsandboxed (allow_unsandboxed=True) runs it "
                "without one"
            )
        with self._of_the_original():
            self.giver.load(self.original.attribute, terms.timeout)
            self._arguments = str(self.giver.request(do="arguments", seed=0)["arguments"])
            sizes = [math.prod(m["shape"]) * 8 for _, m in self._build(self.giver, self.original, terms.dtype)["state"]]
        self._tree, first = self._own_inputs(0)
        room = 6 * sum(t.numel() * 8 + 4 * GUARD for t in first) + 2 * max(sizes, default=0) + (1 << 20)
        self.suspect = start(self.candidate, "candidate.py", room)
        self.suspect.lenient = self.off
        seconds = self.suspect.load(self.candidate.attribute, terms.timeout)
        self._step("P3", "", load_s=round(seconds, 3))
        # Only now are there secrets.
        self._secret = os.urandom(6) if self._seed is None else self._seed.to_bytes(6, "little")
        self.witness = start(self.original, "original.py", room)
        self.reference = start(self.original, "original.py", 2 * room)
        self.narrow = start(self.original, "original.py", room) if terms.dtype == "float64" else None
        with self._of_the_original():
            for worker in filter(None, (self.witness, self.reference, self.narrow)):
                worker.load(self.original.attribute, terms.timeout)
            theirs, made = self._timed_build(self.witness, self.original)
            self._build(self.reference, self.original, "float64")
            if self.narrow:
                self._build(self.narrow, self.original, "float32")
        ours, own = self._timed_build(self.suspect, self.candidate)
        self._start, self._made = ours, (made, own)
        shape, other = ({name: (m["shape"], m["dtype"]) for name, m in side["state"]} for side in (theirs, ours))
        self._shares_state = bool(shape) and shape == other
        if shape and not self._shares_state:
            self.verdict.note(
                "its parameters differ from the original's in names or shapes, so no other weights than those of its "
                "own construction can be given to it"
            )
        self._state = self._given_state = self._read_state(self.witness, theirs)
        self._adopt(self._state, suspect=self._shares_state)
        if self._shares_state:
            self.suspect.request(do="order", names=list(shape))

    @contextlib.contextmanager
    def _of_the_original(self) -> Iterator[None]:
        """Make what the original does wrong no fault of the candidate."""
        try:
            yield
        except Misbehaved as error:
            raise Unjudgeable(f"the original itself cannot be run: {error.reason}") from error

    def _build(self, worker: Worker, program: Program, dtype: str, compiled: bool = False) -> dict[str, Any]:
        worker.request(
            self.terms.timeout, do="build", attribute=program.attribute, arguments=self._arguments,
            seed=self._derived("build"), dtype=dtype, device=self.terms.device, train=self.terms.train,
            compiled=compiled,
        )  # fmt: skip
        return worker.inspect()

    def _timed_build(self, worker: Worker, program: Program) -> tuple[dict[str, Any], float]:
        """Also return the seconds it took, without those in which other programs had its processor."""
        start, queued = time.perf_counter(), worker.queue_time()
        found = self._build(worker, program, self.terms.dtype)
        return found, time.perf_counter() - start - (worker.queue_time() - queued)

    def _derived(self, *purpose: object) -> int:
        """Return the seed of one purpose; none tells anything of another."""
        return int.from_bytes(hashlib.sha256(self._secret + repr(purpose).encode()).digest()[:6], "little")

    def _own_inputs(self, seed: int) -> tuple[Any, list[torch.Tensor]]:
        """Return the original's inputs: those given, changed a little, or those it draws itself."""
        dtype = getattr(torch, self.terms.dtype)
        if self.given is not None:
            tree = {"sequence": "tuple", "items": [{"tensor": i} for i in range(len(self.given))]}
            values = inputs.jittered(self.given, seed) if seed else list(self.given)
        else:
            with self._of_the_original():
                answer = self.giver.request(self.terms.timeout, do="inputs", seed=seed)
                if "missing" in answer:
                    raise Unjudgeable(f"{self.original.name} does not define get_inputs(), and no inputs are given")
                tree, values = answer["tree"], self.giver.tensors(answer["tensors"], 1 << 40)
        return tree, [x.to(dtype).contiguous() if x.is_floating_point() else x.contiguous() for x in values]

    def _actual(self, *purpose: object) -> list[torch.Tensor]:
        return self._own_inputs(self._derived("actual", *purpose))[1]

    def _read_state(self, worker: Worker, inspected: dict[str, Any], most: int = 1 << 40) -> dict[str, torch.Tensor]:
        names, described = [name for name, _ in inspected["state"]], [m for _, m in inspected["state"]]
        return dict(zip(names, worker.tensors(described, most), strict=True))

    def _adopt(self, state: dict[str, torch.Tensor], *, suspect: bool = True, steps: bool = False) -> None:
        """Give all sides the same parameters and buffers, in the precision of each."""
        self._given_state = state
        own = getattr(torch, self.terms.dtype)
        sides = [(self.witness, own), (self.reference, torch.float64)]
        sides += [(self.narrow, torch.float32)] if self.narrow else []
        sides += [(self.suspect, own)] if suspect else []
        self._give(state, sides, steps=steps)

    def _give(
        self, state: dict[str, torch.Tensor], sides: Sequence[tuple[Worker, torch.dtype]], *, steps: bool = False
    ) -> None:
        for worker, dtype in sides:
            values = {n: (t.to(dtype) if t.is_floating_point() else t).contiguous() for n, t in state.items()}
            for batch in worker.batches(values):
                specs = worker.wrap(list(batch.values()))
                worker.fill(specs, list(batch.values()), 0xFF)
                tensors = dict(zip(batch, specs, strict=True))
                worker.request(self.terms.timeout, do="adopt", tensors=tensors, steps=steps)

    def _places(self, worker: Worker) -> dict[str, dict[str, Any]]:
        """Return where parameters and buffers lie in a process, those that can be written over as they are."""
        if self.terms.device != "cpu":
            return {}
        found = [
            (name.removeprefix("_orig_mod."), m) for name, m in worker.inspect()["state"]
        ]  # as torch.compile names it
        return {
            name: m
            for name, m in found
            if name in self._state
            and strides(m) == contiguous(m["shape"])
            and (m["shape"], m["dtype"]) == (list(self._state[name].shape), str(self._state[name].dtype)[6:])
        }

    def _written(self, worker: Worker, places: dict[str, dict[str, Any]], state: dict[str, torch.Tensor]) -> None:
        """Write values into their places in a process, the last of those that share one being the same for all."""
        for name in filter(places.__contains__, state):
            worker.write(places[name], state[name])

    def _other_weights(self, *purpose: object, spread: float = 0.3) -> dict[str, torch.Tensor]:
        g = inputs.generator(self._derived(*purpose))
        new = {}
        for name, value in self._state.items():
            factor = 1 + spread * torch.randn(value.shape, generator=g).double().abs()
            new[name] = (value.double() * factor).to(value.dtype) if value.is_floating_point() else value
        return new

    def _step(self, check: str, failure: str, **numbers: Any) -> None:
        """Write down the outcome of a check; a failure decides."""
        ignored = check in self.off
        self.verdict.line(check, not failure or ignored, failure, **numbers)
        if failure and not ignored:
            self.verdict.end("refused", check, failure[:1000])
            raise Refused

    def _call(self, values: Tensors, **options: Any) -> Call:
        seed = self._derived("call", len(self.verdict.lines), options.pop("salt", ""))
        call = Call(
            self._tree, list(values), seed=seed, grad=self.terms.train, requires_grad=self.terms.train, **options
        )
        return replace(call, cotangents=self._cotangents(seed)) if self.terms.train else call

    def _cotangents(self, seed: int) -> list[torch.Tensor]:
        """Draw what flows back: random, for a sum's ones would hide permutations."""
        g = inputs.generator(seed)
        return [inputs.normal(torch.empty(shape, dtype=dtype), g) for shape, dtype in self._outputs]

    def _metadata(self, o: Result, y: Result) -> None:
        """M1 to M4: what kind of thing came back."""
        for index, m in enumerate(y.metadata):
            where = f"result {index}"
            expected = o.metadata[index] if index < len(o.metadata) else m
            if m["type"] != expected["type"]:
                self._step("M1", f"{where} is a {m['type']}, the original's a {expected['type']}")
            if more := set(m["traits"]) - set(expected["traits"]):
                self._step("M1", f"{where} is {', '.join(sorted(more))}, which the original's is not")
            if m["odd"] != expected["odd"]:
                self._step("M1", f"{where} is {', '.join(m['odd']) or 'plain'}, which the original's is not")
            if m["requires_grad"] != expected["requires_grad"] and (self.terms.train or m["requires_grad"]):
                self._step("M4", f"{where} has {'a' if m['requires_grad'] else 'no'} gradient, unlike the original's")
            if not m["address"] and math.prod(m["shape"]) and not m["odd"]:
                self._step("M1", f"{where} has no memory")
        if y.tree != o.tree and self.terms.train and y.tree.get("items", [])[:1] == o.tree["items"][:1]:
            self._step("N7", "it has gradients for other inputs or parameters than the original")
        if other := unlike(o, y):
            self._step("M2", other)
        for index, (a, b) in enumerate(zip(o.metadata, y.metadata, strict=True)):
            if strides(a) != strides(b) and index < len(self._outputs):  # of gradients they mean nothing
                if strides(b) != contiguous(b["shape"]):
                    self._step(
                        "M3",
                        f"result {index} has strides {b['stride']}, the original's {a['stride']}; return it so, or "
                        "contiguous",
                    )
                self.verdict.note(f"result {index} is contiguous where the original's has strides {a['stride']}")

    def _earlier(self, o: Result, y: Result) -> str:
        """Say so if a wrong result is one that an earlier call gave."""
        for old in self._past:
            if len(old.tensors) != len(y.tensors):
                continue
            same = [
                torch.equal(a, b) and a.numel() > 1 and not torch.equal(a, c)
                for a, b, c in zip(y.tensors, old.tensors, o.tensors, strict=True)
                if a.shape == b.shape and a.dtype == b.dtype
            ]
            if same and all(same) and all(bool((t != t.reshape(-1)[:1]).any()) for t in y.tensors):
                return "it returned the result of an earlier call for new inputs"
        return ""

    def _untouched(self, o: Result, y: Result) -> None:
        """S1, U2: what a call did to what the caller holds."""
        for index in y.changed:
            if index not in o.changed:
                self._step("S1", f"it changed input {index}, which the original leaves alone")
        for index in o.changed:
            if index not in y.changed:
                self._step("S1", f"it left input {index} alone, which the original changes")
            result = judged("", o.inputs_after[index].double(), o.inputs_after[index], y.inputs_after[index],
                             numerics.NOTHING, 4 * self._longest)  # fmt: skip
            if result.reason:
                self._step("S1", f"it changed input {index} otherwise than the original: {result.reason}")
        if others := sorted(set(y.left) - set(o.left)):
            self._step("S1", f"it changed {', '.join(others)}, in the caller's hands")
        if y.cotangents_changed and not o.cotangents_changed:
            self._step("S1", "its backward changed the gradient that it was given, which others may use")
        if y.overrun and not o.overrun:
            self._step("U2", "it wrote to memory next to its inputs")

    def _traces(self, o: Result, y: Result) -> None:
        """S1, S2, S7, U2: what a call did other than returning."""
        self._untouched(o, y)
        if self._aliases != y.aliases:
            self._step("S2", f"its results share memory with {y.aliases}, the original's with {self._aliases}")
        for index in range(len(self._outputs)):
            if y.reused[index] and not o.reused[index]:
                self._step("S7", f"result {index} lies in the memory of an earlier call's result, which is still held")

    def _surroundings(self, original: Worker, candidate: Worker, modes: str, calls: int = 1) -> None:
        """S1, S3 to S5, S8: what a candidate left, whose modes were these, and its state after so many calls."""
        with self._of_the_original():
            expected = original.inspect()
        found = candidate.inspect()
        changed = {n: v for n, v in found["settings"].items() if expected["settings"].get(n) != v}
        self._step("S4", f"it changed global settings: {_listed(changed)}" if changed else "")
        patched = sorted(set(found["patched"]) - set(expected["patched"]))
        self._step("S5", f"it replaced {', '.join(map(str, patched))}" if patched else "")
        differs = found["random"] != expected["random"]
        self._step("S3", "it leaves another random state than the original" if differs else "")
        failure = "it changed its training mode, its hooks, or which parameters need or have a gradient"
        self._step("S8", failure if found["modes"] != modes else "")
        if self._shares_state:
            theirs = self._read_state(original, expected)
            most = 2 * sum(t.numel() * t.element_size() for t in theirs.values()) + (1 << 20)
            self._same_state(theirs, self._read_state(candidate, found, most), calls)

    def _same_state(self, theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], calls: int) -> None:
        if theirs.keys() != ours.keys():
            self._step("S1", "it changed the names of its parameters")
        for name, value in theirs.items():
            mine = ours[name]
            if identical(value, mine):
                continue
            untouched = identical(value, self._state[name])
            if untouched or value.shape != mine.shape or value.dtype != mine.dtype or not value.is_floating_point():
                self._step(
                    "S1", f"it changed its parameter or buffer {name}" if untouched else f"its {name} is another"
                )
                continue
            terms = 4 * self._longest * calls**2  # each call adds its rounding error
            result = numerics.compare("", value.double(), value, mine, None, terms, parts=False)
            self._step("S1", result.reason and f"its parameter or buffer {name} differs: {result.reason}")

    def _unchanged(self, worker: Worker, kept: Result) -> None:
        now = worker.again(kept, self._most)
        own = [not alias or alias[0] != "input" for alias in kept.aliases]
        if any(mine and not identical(a, b) for mine, a, b in zip(own, kept.tensors, now, strict=True)):
            self._step("S7", "a result that was kept changed with a later call")

    def _seconds(self, result: Result) -> float:
        """Return the time of a call, without that in which other programs had its processor.

        Of one thread it is known how long it waited. What its process used is counted in any case, so that waiting
        for one's own helpers is no gain. Of several threads it is not known.
        """
        if self.terms.threads > 1:
            return result.seconds
        return max(result.seconds - result.waited, result.processor)


def _listed(changed: dict[str, str]) -> str:
    return ", ".join(f"{name} is {str(value)[:80]}" for name, value in sorted(changed.items()))
