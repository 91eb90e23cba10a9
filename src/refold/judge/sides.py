"""The processes of a trial: the candidate, and the original in its own dtype, in float64 and, for float64, in float32.

The original in its own dtype is the *witness* of what a call must return, change, share and leave. In float64 it is the
*reference*. This process draws inputs and weights and gives them to all; it runs no code of the programs.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from . import inputs, weights
from .branches import Branches, Cover
from .docket import Docket
from .errors import Misbehaved, Unjudgeable
from .messages import Description, Drawn, Inspected
from .nursery import Nursery
from .process import Call, Process, Result
from .program import Program
from .results import identical, rms
from .sandbox import enough
from .shared import GUARD

Tensors = Sequence[torch.Tensor]
State = dict[str, torch.Tensor]
_First = TypeVar("_First")
_Second = TypeVar("_Second")
ROWS = 1 << 20  # elements of inputs and results together, where there are many rows
_SPREAD, _MANY = 1.5, 64  # how much larger initial values may be, of so many
_GRADIENTS = ["torch.fx.experimental.symbolic_shapes"]  # which torch.autograd.grad imports


def together(first: Callable[[], _First], second: Callable[[], _Second]) -> tuple[_First, _Second]:
    """Ask two processes at once, and return both answers."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second)
        return first(), other.result()


class Sides:
    """The programs of one trial, in their processes.

    Attributes:
        suspect: The process of the candidate.
        witness: Of the original.
        reference: Of the original in float64.
        narrow: Of a float64 original in float32; None of others.
        shares_state: Whether the candidate has the original's parameters and buffers, so that others can be given.
        state: Parameters and buffers that all begin with.
        given: What they were given last.
        parameters: The names of those that are no buffers.
        stateful: Whether the original changes its buffers.
        constant: Parameters and buffers that it leaves alone.
        random: Whether it draws random numbers.
        outputs: Shape and dtype of each of its results.
        longest: The number of terms of its longest sum.
        squares: How many of its operations square numbers unseen.
        cost: Seconds of a call on all sides.
        most: The most bytes that results may span.
        made: The seconds that it took to make the witness and the candidate.
        modes: Training modes, hooks and needs of gradients of the candidate at first.
        cover: Which branches of the candidate have run, if its process says so.
        own: The candidate's own parameters and buffers at first, by its own names, if those are not the original's.
        varied: Integers among the original's that its construction draws, as it draws them another time.
    """

    suspect: Process
    witness: Process
    reference: Process
    made: tuple[float, float]
    modes: str

    def __init__(self, original: Program, candidate: Program, given: Tensors | None, docket: Docket, nursery: Nursery):
        self.original, self.candidate, self.docket, self.nursery = original, candidate, docket, nursery
        self.narrow: Process | None = None
        self.shares_state = self.stateful = self.random = False
        self.state: State = {}
        self.own, self.varied = self.state, self.state
        self.given, self._way = self.state, "loaded"
        self.parameters: set[str] = set()
        self.constant: set[str] = set()
        self.outputs: list[tuple[list[int], torch.dtype]] = []
        self.longest, self.squares, self.cost, self.most = 1, 0, 0.0, 1 << 20
        self.cover: Cover | None = None
        self._inputs = given
        self._stack = contextlib.ExitStack()
        self._differentiated: list[str] = []
        self._first: dict[str, str] = {}  # of the names of a parameter or buffer

    @property
    def dtype(self) -> torch.dtype:
        """What floating-point inputs and parameters are cast to."""
        found: torch.dtype = getattr(torch, self.docket.terms.dtype)
        return found

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self) -> None:
        """Start all processes and give them the same state."""
        terms, docket = self.docket.terms, self.docket
        self.nursery.imports = _GRADIENTS * terms.train
        texts = self.candidate.text + self.original.text
        # Triton is told before it is imported how to run.
        if re.search(r"torch\.compile\b", texts) and "triton" not in texts:
            self.nursery = self.nursery.other(compiler=True)
        self._giver = self.start(self.original, 1 << 16)
        docket.verdict.sandbox = self._giver.active
        for text in self._giver.unseen:
            docket.note(text)
        if self.nursery.sandboxed and (missing := enough(self._giver.active)):
            raise Unjudgeable(
                f"there is no sandbox to run it in: {missing}. --allow-unsandboxed (allow_unsandboxed=True) runs it "
                "without one"
            )
        with self.of_the_original():
            self._giver.load(self.original.attribute)
            self._arguments = self._giver.ask("arguments", str)
            described = self.build(self._giver, self.original, terms.dtype)
        sizes = [math.prod(m.shape) * 8 for m in described.state.values()]
        self.tree, self.first = self._own_inputs(0)
        room = 6 * sum(t.numel() * 8 + 4 * GUARD for t in self.first) + 2 * max(sizes, default=0) + 8 * ROWS
        self.suspect = self.start(self.candidate, room)
        seconds = self.suspect.load(self.candidate.attribute)
        docket.step("P3", load_s=round(seconds, 3))
        docket.draw_secret()  # only now are there secrets
        self.witness, self.reference = self.start(self.original, room), self.start(self.original, 2 * room)
        self.narrow = self.start(self.original, room) if terms.dtype == "float64" else None
        with self.of_the_original():
            for process in filter(None, (self.witness, self.reference, self.narrow)):
                process.load(self.original.attribute)
            theirs, made = self._timed_build(self.witness, self.original)
            self.build(self.reference, self.original, "float64")
            if self.narrow:
                self.build(self.narrow, self.original, "float32")
        ours, own = self._timed_build(self.suspect, self.candidate)
        self.modes, self.made = ours.modes, (made, own)
        self._compare_state(theirs, ours)
        self.first = self.actual(0)

    def _compare_state(self, theirs: Inspected, ours: Inspected) -> None:
        """Find out whether both have the same parameters, and give them the same values."""
        self._names, other = theirs.names, theirs.state
        self.state = self.given = self.read_state(self.witness, theirs)
        again = self.read_state(self._giver, self._giver.inspect())
        self.varied = {name: value for name, value in self.state.items() if not inputs.is_real(value)}
        self.varied = {name: again[name] for name, value in self.varied.items() if not identical(value, again[name])}
        self.suspect.names = names = self._paired(ours, other)
        own = {m.type for m in ours.state.values()} - {m.type for m in other.values()} - {"Tensor", "Parameter"}
        self.docket.step("S8", f"among its parameters is a {own.pop()}, which may do anything else" if own else "")
        self.shares_state = bool(names)
        if other and not names:
            self.docket.note(
                "its parameters differ from the original's in names or shapes, so no other weights than those of its "
                "own construction can be given to it"
            )
        if names:
            self._compare_start(ours, [name for name in names.values() if name] == list(other))
        needs = [n for own, n in names.items() if n and ours.state[own].requires_grad != other[n].requires_grad]
        if needs:
            self.docket.note(f"unlike the original's, its {', '.join(needs[:5])} need or need no gradient")
        self.parameters = {name for name, m in theirs.state.items() if m.type == "Parameter"}
        seen: dict[str, str] = {}  # one parameter may have two names
        for name, m in theirs.state.items():
            self._first[name] = seen.setdefault(f"{m.address} {m.shape} {m.stride}" if m.span else name, name)
            if m.requires_grad and self._first[name] == name:
                self._differentiated.append(name)
        self.adopt(self.state, suspect=self.shares_state)
        self._order()

    def _order(self) -> None:
        """Let the candidate give gradients of parameters in the original's order."""
        if self.shares_state:
            own = {name: one for one, name in self.suspect.names.items()}
            self.suspect.ask("order", names=[own[name] for name in self.state])

    def _compare_start(self, ours: Inspected, ordered: bool) -> None:
        """Note what training from the start would find: other initial values, another order for an optimizer."""
        mine = self.read_state(self.suspect, ours, 4 * sum(t.numel() * 8 for t in self.state.values()) + (1 << 20))
        other = []
        for own, name in self.suspect.names.items():
            least, most = sorted(rms([t]) for t in (mine[own], self.state[name])) if name else (0.0, 0.0)
            other += [name] * (least * (_SPREAD if mine[own].numel() >= _MANY else 1e9) < most)
        if other:
            self.docket.note(f"initial values of its {', '.join(other[:5])} have another size than the original's")
        if not ordered:
            self.docket.note("its parameters have another order than the original's; optimizers load their state by it")

    def _paired(self, ours: Inspected, other: dict[str, Description]) -> dict[str, str]:
        """Return the original's name for each of the candidate's parameters and buffers, or nothing if one has no twin.

        Twins have one name, or else the same values at first: both are made from one seed. Of equal values, as those of
        two biases, only the order tells which is which, so then all of them must be in the original's order.
        """
        mine, most = ours.state, 4 * sum(m.span for m in other.values()) + (1 << 20)

        def alike(own: str, name: str) -> bool:
            a, b = mine[own], other[name]
            return (a.shape, a.dtype, a.device, a.odd) == (b.shape, b.dtype, b.device, b.odd)

        if all(name in mine and alike(name, name) for name in other):
            return {name: name if name in other else "" for name in mine} if other else {}
        if sum(m.span for m in mine.values()) > most:
            return {}
        self.own = self.read_state(self.suspect, ours)
        found: dict[str, str] = {}
        unsure = False
        for name in other:
            same = [n for n in mine if n not in found and alike(n, name) and identical(self.own[n], self.state[name])]
            if not same:
                return {}
            unsure |= len(same) > 1
            found[same[0]] = name
        if unsure and [name for name in mine if name in found] != list(found):
            return {}
        return {name: found.get(name, "") for name in mine}

    def start(self, program: Program, room: int) -> Process:
        """Start a process for a program; it ends with the trial."""
        return self._stack.enter_context(self.fresh(program, room))

    @contextlib.contextmanager
    def fresh(
        self, program: Program, room: int = 0, *, nursery: Nursery | None = None, beside: Process | None = None
    ) -> Iterator[Process]:
        """Start a process for a program, and end it on the way out."""
        name = "candidate.py" if program is self.candidate else "original.py"
        room = room or self.suspect.shared.room
        with (nursery or self.nursery).program(program.text, name, room=room, beside=beside) as process:
            process.channel.until, process.timeout = self.docket.until, self.docket.terms.timeout
            if program is self.candidate:
                process.lenient, process.most = self.docket.off, self.most
            yield process

    @contextlib.contextmanager
    def ready(
        self, program: Program, *, dtype: str = "", compiled: bool = False, branches: Any = None, **options: Any
    ) -> Iterator[Process]:
        """Make a program, maybe in another dtype or with marks, in a process of its own, which ends on the way out."""
        with self.fresh(program, **options) as process:
            process.load(program.attribute, branches)
            self.build(process, program, dtype or self.docket.terms.dtype, compiled=compiled)
            yield process

    @contextlib.contextmanager
    def doubled(self, branches: Branches) -> Iterator[Cover]:
        """Let another process of the candidate take its place for a while, in which marks tell which branches run."""
        suspect = self.suspect
        with self.ready(self.candidate, branches=branches, beside=suspect) as process:
            process.names = suspect.names
            self.suspect, self.cover = process, Cover(branches, process)
            try:
                self._order()
                self.adopt(self.state, suspect=self.shares_state)
                yield self.cover
            finally:
                self.suspect, self.cover = suspect, None
        self.adopt(self.state, suspect=self.shares_state)

    @contextlib.contextmanager
    def of_the_original(self) -> Iterator[None]:
        """Make what the original does wrong no fault of the candidate."""
        try:
            yield
        except Misbehaved as error:
            raise Unjudgeable(f"the original itself cannot be run: {error.reason}") from error

    def build(self, process: Process, program: Program, dtype: str, *, compiled: bool = False) -> Inspected:
        """Make a program in its process."""
        terms, seed = self.docket.terms, self.docket.derived("build")
        how = {"seed": seed, "dtype": dtype, "device": terms.device, "train": terms.train, "compiled": compiled}
        made = {"attribute": program.attribute, "arguments": self._arguments}
        process.ask("build", timeout=process.timeout, **made, **how)
        return process.inspect()

    def _timed_build(self, process: Process, program: Program) -> tuple[Inspected, float]:
        """Also return the seconds it took, without those in which other programs had its processor."""
        start, queued = time.perf_counter(), process.queue_time()
        found = self.build(process, program, self.docket.terms.dtype)
        return found, time.perf_counter() - start - (process.queue_time() - queued)

    # Inputs.

    def _own_inputs(self, seed: int) -> tuple[Any, list[torch.Tensor]]:
        """Return the original's inputs: those given, changed a little, or those it draws itself."""
        if self._inputs is not None:
            tree = {"sequence": "tuple", "items": [{"tensor": i} for i in range(len(self._inputs))]}
            values = inputs.jittered(self._inputs, seed) if seed else list(self._inputs)
        else:
            with self.of_the_original():
                drawn = self._giver.ask("inputs", Drawn | None, timeout=self._giver.timeout, seed=seed)
                if drawn is None:
                    raise Unjudgeable(f"{self.original.name} does not define get_inputs(), and no inputs are given")
                tree, values = drawn.tree, self._giver.tensors(drawn.tensors, 1 << 40)
        return tree, [x.to(self.dtype).contiguous() if x.is_floating_point() else x.contiguous() for x in values]

    def actual(self, *purpose: object) -> list[torch.Tensor]:
        """Draw inputs like those of the original, anew for each purpose."""
        return self._own_inputs(self.docket.derived("actual", *purpose))[1]

    def drawn(self, kind: str, *purpose: object) -> list[torch.Tensor]:
        """Draw inputs of a kind."""
        return inputs.draw(kind, self.first, self.docket.derived(*(purpose or (kind,))))

    def call(self, values: Tensors, **options: Any) -> Call:
        """Make a call of the programs, with what flows back into its results if gradients count."""
        train = self.docket.terms.train
        seed = self.docket.anew("call", options.pop("salt", ""))
        mode, back = ("recorded", self.cotangents(seed)) if train else ("plain", [])
        return Call(self.tree, list(values), back, requires_grad=train, seed=seed, mode=mode, **options)

    def cotangents(self, seed: int) -> list[torch.Tensor]:
        """Draw what flows back: random, for a sum's ones would hide permutations."""
        g = inputs.generator(seed)
        return [inputs.normal(torch.empty(shape, dtype=dtype), g) for shape, dtype in self.outputs]

    def wide(self, call: Call, dtype: torch.dtype = torch.float64) -> Call:
        """Cast all real and complex numbers of a call."""
        tensors, cotangents = ([inputs.cast(t, dtype) for t in some] for some in (call.tensors, call.cotangents))
        return replace(call, tensors=tensors, cotangents=cotangents)

    def named(self, tree: Any) -> Any:
        """Return arguments by the names that the original has for them; None if it has too few."""
        items = tree.get("items", ())
        if "sequence" not in tree or len(items) > len(self._names):
            return None
        return {"dict": "dict", "items": [list(each) for each in zip(self._names, items, strict=False)]}

    def originals(self, call: Call, *, wide: bool = True) -> tuple[Result, Result]:
        """Call the original, and the original in float64, if that says what is right and is wanted."""
        if self.random or not wide:
            return (o := self.witness.call(call)), o
        return together(partial(self.witness.call, call), partial(self.reference.call, self.wide(call)))

    @property
    def not_given(self) -> list[str]:
        """The original's arguments, in their order, for which its inputs have nothing."""
        return self._names[len(self.tree.get("items", ())) :] if "sequence" in self.tree else []

    def ask(self, call: Call) -> Result:
        """Call the candidate."""
        if self.cover is not None:
            self.cover.asked()
        return self.suspect.call(call)

    def gradients(self, call: Call) -> list[str]:
        """Name what gradients are asked for, in the order of the results."""
        floating = [i for i, t in enumerate(call.tensors) if inputs.is_real(t) and i not in call.constant]
        names = [f"input {index}" for index in floating if call.requires_grad]
        names += [name for at, name in enumerate(self._differentiated) if not call.frozen >> at & 1]
        back = [f"what flows into result {i}" for i, _ in enumerate(call.cotangents)]
        return names + (back if call.flow == "differentiated" else [])

    # Weights.

    def read_state(self, process: Process, inspected: Inspected, most: int = 1 << 40) -> State:
        """Copy parameters and buffers out of a process."""
        return dict(zip(inspected.state, process.tensors(inspected.state.values(), most), strict=True))

    def adopt(self, state: State, *, suspect: bool = True, way: str = "loaded") -> list[str]:
        """Give all sides the same parameters and buffers, in the precision of each; the way is the candidate's.

        Returns those that the candidate shares with what it is a copy of.
        """
        shared = list[str]()
        self.given, self._way = state, way
        sides = [(self.witness, self.dtype), (self.reference, torch.float64)]
        sides += [(self.narrow, torch.float32)] if self.narrow else []
        with self.of_the_original():
            for process, dtype in sides:
                self.give(process, state, dtype)
        if suspect:
            shared = self.give(self.suspect, state, self.dtype, way=way)
            self.suspect.state()  # they may lie elsewhere now
        return shared

    def give(self, process: Process, state: State, dtype: torch.dtype, *, way: str = "loaded") -> list[str]:
        """Give one process parameters and buffers."""
        order = random.Random(self.docket.anew("order")).sample(list(state), len(state))  # which says nothing
        own = {name: state[self._first[name]] for name in order}
        values = {n: t.to(dtype) if t.is_floating_point() else t for n, t in own.items()}
        return process.adopt(values, way)

    def settle_state(self) -> None:
        """Undo what earlier calls have done to buffers."""
        if self.stateful and self.shares_state:
            self.adopt(self.given, way=self._way)

    def other_weights(self, kind: str, *purpose: object, spread: float = 0.3) -> State:
        """Draw weights of a kind."""
        seed = self.docket.derived(kind, *purpose)
        return weights.drawn(kind, self.state, self.parameters, seed, spread) | self.varied

    def places(self, process: Process) -> dict[str, Description]:
        """Return where parameters and buffers lie in a process, so that they can be written over as they are."""
        if self.docket.terms.device != "cpu":
            return {}
        found = {name.removeprefix("_orig_mod."): m for name, m in process.state().items()}  # of torch.compile
        return {name: m for name, m in found.items() if name in self.state}

    def write(self, process: Process, places: dict[str, Description], state: State) -> None:
        """Write values into their places in a process."""
        for name in filter(places.__contains__, state):
            process.write(places[name], state[self._first[name]])
