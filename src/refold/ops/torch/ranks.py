"""Operators on a sequence that is cut over the ranks of a process group: each rank computes its own tokens.

The tokens of a rank map the state that enters to the one that leaves: ``M S + U`` (`refold.ops.spec.Carry`). The
operator itself gives both: U is its final state if zero enters, M what it makes of ones or of the identity. All ranks
compute their tokens from zero at once. One all-gather tells them all U and M; each folds those before its own, and
computes again, from the state that enters, the tokens that this state reaches: its reach (`_Call.look`). Where states
decay, these are few, and M is zero. The gradient of a state goes back in the same way, by the transposed maps: that of
the state that enters comes from the tokens that it reaches; again one all-gather, then the operator's own backward. No
gradient passes through M and U: the maps are numbers, and the last pass holds every use of the arguments. A backend
with `HOOKS` adds what the state adds to results that are there, and finds the reach itself: the host does not wait.

Of a pack, only the document that is open at the end of a rank's tokens is told. The others are in the call of that rank
as sequences without tokens. docs/scale.md says who has which rows of states, and which gradients are partial sums.

The call is one node, ``refold::<op>_ranks(arrays, options, backend, group, lengths, layout, writes)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from refold.errors import ArgumentError, RefoldError
from refold.ops.arrays import meta_of
from refold.ops.backends import backend_module, resolve
from refold.ops.spec import CU_SEQLENS, Arg, Carry, Meta, OpSpec, all_specs, check_cu_seqlens_values, shape_of
from refold.ops.torch import private, sharded
from refold.ops.torch.cuts import Cut, Piece, agree, all_gather, cut_of_node, node_of, pieces
from refold.ops.torch.nodes import apart_from_autocast, define, differentiate, refuse_derivative
from refold.ops.torch.registry import OPS, gradients_alone, is_plain, prepared, run_alone, signature_of
from refold.ops.torch.spoiled import spoil

INITIAL = "initial_state"

NEGLIGIBLE = 2.0**-10
"""What is left of a state counts as nothing if it is less than this part of its rounding, or of y's if added to it."""

ALIGNED = 32
"""Rows of numbers on their way have a multiple of so many, so that kernels can read states where they arrive."""

FORGOTTEN = -0.0
"""In a map, what a reset makes of a state: nothing, whatever it was. A factor of zero is 0.0, and keeps a NaN."""

STEPS = {"cuda": 256}
"""Tokens in steps of which a device tells reaches; one by one where it has no entry."""

HOOKS = "leave", "enter", "enter_backward"
"""Functions that a backend may have: what tokens leave, what a state that enters adds to results, and its gradient."""

_DESCRIBED: dict[Any, _Described] = {}
"""What is known of the arguments of calls, by signature: finding out takes most of the host's time."""


@cache
def _side(device: torch.device) -> Any:
    """Return a stream next to the one that computes, whose kernels need not wait for those of a scan."""
    return torch.cuda.Stream(device, priority=-1)


def run(spec: OpSpec, arrays: Sequence[Any], options: Sequence[Any], backend: str, group: Any) -> Any:
    """Run an operator on the tokens of this rank; ``group`` may be a pair, with the writes of each token of a layer.

    Raises:
        ArgumentError: The arguments are not valid here or on another rank, or ranks disagree.
    """
    one, writes = group if isinstance(group, tuple) else (group, 1)
    node = node_of(one)
    if sharded.given(arrays):
        return sharded.run(spec, spec.name, arrays, options, lambda own: run(spec, own, options, backend, group))
    try:
        options = prepared(spec, arrays, options)
    except RefoldError:
        refuse(spec, arrays, one)
        raise
    inputs = (*arrays, *spec.written_options(options), backend, *node, writes)
    if private.watched() or torch.is_autocast_enabled(arrays[0].device.type) or not is_plain(arrays, options):
        return OPS[f"{spec.name}_ranks"](*inputs)[:2]
    direct = _DIRECT[spec.name]
    if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in arrays):
        return direct.apply(*inputs)[:2]
    return direct.run(*inputs)[:2]


def refuse(spec: OpSpec, arrays: Sequence[Any], group: Any) -> None:
    """Tell the other ranks of a group that this one refuses its arguments; they raise, too."""
    _ask(cut_of_node(*node_of(group)), spec, _named(spec, arrays), (), refused=True)


class _Described:
    """What does not depend on values, nor on other ranks.

    Attributes:
        meta: Of the arguments.
        carry: How states follow from states.
        dtype: Of states on their way.
        timed: The arguments that have tokens.
        hooks: `HOOKS` of the backend, if it has them.
        plans: Of hooks.
        shape: Of the states of the rows of a batch.
        map_shape: Of a map.
        results: Shapes and dtypes of y and of the final states.
        wide: Options with which final states have the dtype that they are computed in.
    """

    def __init__(self, spec: OpSpec, arrays: dict[str, Any], options: dict[str, Any], backend: str) -> None:
        self.meta, self.carry, module = _described(spec, arrays, options, backend)
        self.dtype, self.timed = _state_dtype(spec, self.meta), {arg.name for arg in spec.args if arg.timed}
        self.shape = shape_of(spec.outputs[1].axes, {**self.meta.sizes, "k": self.meta.sizes["b"]})
        self.map_shape = _map_shape(spec, self.meta, self.carry)
        hooks = {name: getattr(module, name, None) for name in HOOKS}
        usable = None not in hooks.values() and 0 not in self.shape + self.map_shape
        self.hooks: dict[str, Any] | None = hooks if usable else None
        self.plans: dict[Any, Callable[..., Any]] = {}
        self.results = [(shape, getattr(torch, dtype)) for shape, dtype in spec.output_metas(self.meta)]
        self.wide = tuple(_wide(options).values())


@lru_cache(maxsize=1024)
def _cut_up(lengths: tuple[int, ...], layout: str, writes: int) -> tuple[list[Piece], list[_Part]]:
    """Return the runs of tokens of all ranks, and the parts that have some, without a pack."""
    runs = pieces(lengths, layout, writes)
    return runs, [_Part(p, None, p.end == sum(lengths)) for p in runs if p.end > p.begin]


class _Part:
    """A run of tokens, and the documents in it. Without a pack, each row of the batch is a document.

    Conditions are bools where the host knows them, and tensors where they depend on offsets.
    """

    def __init__(self, piece: Piece, offsets: Tensor | None, closes: bool) -> None:
        self.piece, self.pack, self.closes = piece, offsets, closes
        begin, end = piece.begin, piece.end
        self.tokens, self.count = slice(piece.at, piece.at + end - begin), end - begin
        self.offsets, self.own = None, cast(Any, closes)
        self.first = self.last = None
        self.enters = self.through = cast(Any, begin > 0)
        if offsets is not None:
            ends = offsets[1:].contiguous()
            self.offsets = (offsets - begin).clamp(0, end - begin)
            self.first, self.last = (
                torch.searchsorted(ends, at, right=True).clamp(max=len(ends) - 1) for at in (begin, end - 1)
            )
            self.enters = begin > 0 and offsets.take(self.first) < begin  # a document is open where the run begins
            self.through = begin > 0 and offsets.take(self.last) < begin  # and it is the one that is open at its end
            self.entered_end = ends.take(self.first)
            self.own = ((ends > begin) if begin else (ends >= 0)) & (ends <= end)  # documents that end here

    @cached_property
    def entered_tokens(self) -> Tensor | None:
        """How many tokens belong to the document that is open where the run begins; None without a pack: all."""
        if self.pack is None:
            return None
        tokens: Tensor = (self.entered_end - self.piece.begin).clamp(max=self.count) * self.enters
        return tokens

    def some(self, begin: int, end: int) -> _Part:
        """Return the part of some of the tokens, counted from its first."""
        piece = Piece(self.piece.rank, self.piece.at + begin, self.piece.begin + begin, self.piece.begin + end)
        return _Part(piece, self.pack, self.closes and piece.end == self.piece.end)

    def row(self, states: Tensor, document: Any) -> Tensor:
        """Return the state of a document; without a pack, those of all rows."""
        return states if document is None else states.index_select(0, document.reshape(1))

    def put(self, states: Tensor, document: Any, row: Tensor, where: Any) -> Tensor:
        """Return states with that of a document replaced, where a condition holds."""
        if document is not None:
            where = (torch.arange(len(states), device=states.device) == document) & where
        return _pick(where, row, states)


def _pick(where: Any, a: Tensor, b: Tensor | None = None) -> Tensor:
    """Return ``a`` where a condition holds (for all, or for rows), else ``b`` or zeros."""
    if where is True:
        return a
    b = torch.zeros_like(a) if b is None else b
    if where is False:
        return b
    return torch.where(where.reshape(-1, *[1] * (a.dim() - 1)), a, b)


class _Call:
    """A call of an operator on all ranks of a group, as this rank sees it."""

    def __init__(self, spec: OpSpec, inputs: Sequence[Any], told: Sequence[int] | None = None) -> None:
        count, self.spec = len(spec.args), spec
        arrays, options = inputs[:count], spec.unwritten_options(inputs[count:-5])
        self.arrays = _named(spec, arrays)
        self.options = dict(zip([o.name for o in spec.options], options, strict=True))
        self.backend, self.cut, self.writes = inputs[-5], cut_of_node(*inputs[-4:-1]), inputs[-1]
        size, rank = self.cut.size, self.cut.rank
        self.lengths = list(told[:size] if told else self._told())
        key = spec.name, signature_of(arrays, options, self.backend)
        if (found := _DESCRIBED.get(key)) is None:
            if len(_DESCRIBED) >= 4096:
                _DESCRIBED.clear()
            found = _DESCRIBED[key] = _Described(spec, self.arrays, self.options, self.backend)
        self.found, self.meta, self.carry, self.dtype, self.hooks = (
            found, found.meta, found.carry, found.dtype, found.hooks,
        )  # fmt: skip
        self.offsets = self.arrays.get(CU_SEQLENS)
        self.window = self.meta.sizes["w"] - 1 if self.carry.kind == "window" else None
        self.total = sum(self.lengths)
        self.pieces, self.parts = _cut_up(tuple(self.lengths), self.cut.layout, self.writes)
        if self.offsets is not None:
            self.parts = [_Part(part.piece, self.offsets, part.closes) for part in self.parts]
        self.mine = [part for part in self.parts if part.piece.rank == rank]
        self.slots = [p for p in self.pieces if p.rank == rank]
        self.tokens = arrays[0].shape[1]
        self.done: dict[Piece, tuple[Tensor, Tensor]] = {}
        """Results as if zeros entered."""
        self.maps: dict[Piece, Tensor] = {}
        self.sums: dict[Piece, Tensor] = {}
        self.reach: dict[Piece, Any] = dict(zip(self.slots, told[size:] if told else (), strict=bool(told)))
        if self.mine and self.offsets is not None and self.offsets.device.type == "cpu":
            check_cu_seqlens_values(spec.name, self.offsets.tolist(), self.total)

    def _told(self) -> Sequence[int]:
        """Return the tokens of each rank; where they are not given, the ranks tell them."""
        cut, spec, tokens = self.cut, self.spec, next(iter(self.arrays.values())).shape[1]
        if cut.lengths is None:
            try:
                _described(spec, self.arrays, self.options, self.backend)
            except RefoldError:
                _ask(cut, spec, self.arrays, (), refused=True)
                raise
            return _ask(cut, spec, self.arrays, list(self.options.values()), self.writes, refused=False)
        lengths = [length * self.writes for length in cut.lengths]
        if tokens != lengths[cut.rank]:
            raise ArgumentError(
                f"{spec.name}: rank {cut.rank} has {tokens} tokens; the cut says {lengths[cut.rank]}. Pass a Cut "
                "with the lengths of this batch, or without lengths."
            )
        return lengths

    def of(self, part: _Part, array: Tensor | None) -> Tensor | None:
        """Return the tokens of a part."""
        return array if array is None or part.count == array.shape[1] else array[:, part.tokens]

    def given(self, part: _Part, initial: Tensor | None, **changed: Any) -> list[Any]:
        """Return the arrays of the operator's own call on a part."""
        timed = () if part.count == self.tokens else self.found.timed
        found = {n: a[:, part.tokens] if a is not None and n in timed else a for n, a in self.arrays.items()}
        found |= {INITIAL: initial}
        if CU_SEQLENS in found:
            found[CU_SEQLENS] = part.offsets
        return list((found | changed).values())

    def run(self, arrays: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Run the operator itself; its states are not rounded."""
        y, state = run_alone(self.spec.name, arrays, self.found.wide, self.backend)
        return y, state

    def initial(self, part: _Part, row: Tensor | None) -> Tensor | None:
        """Return the states that the operator's own call on a part starts from; ``row`` enters, zeros if None."""
        given = self.arrays[INITIAL]
        if part.enters is False or (given is None and row is None):
            return given
        shape = self.shape(k=self.meta.sizes["k"])
        states = self.zeros(shape) if given is None else given.to(torch.promote_types(given.dtype, self.dtype))
        row = self.zeros(self.found.shape) if row is None else row
        return part.put(states, part.first, row.to(states.dtype), part.enters)

    def left(self, part: _Part) -> Tensor | None:
        """Compute a part as if zeros entered, if that tells something; return the row that its rank passes, or None."""
        piece = part.piece
        if self.hooks is not None:
            _, states = self.done[piece] = self.run(self.given(part, self.initial(part, None)))
            if part.enters is False or part.closes:  # for its map, nobody asks
                return None if part.closes else self.row(part.row(states, part.last))
            row, own = self.row(), part.row(states, part.last)
            self.sums[piece], self.maps[piece] = self.hook("leave", part, state=own, out=row)
            return row
        self.reach[piece] = near = self.look(part)
        if part.closes and (self.window is not None or near == part.count) and part.enters is not False:
            return None
        short = part if self.window is None else part.some(max(part.count - max(self.window, 1), 0), part.count)
        y, states = self.run(self.given(short, self.initial(short, None)))
        if self.window is None:
            self.done[piece] = y, states
        if callable(near):
            self.reach[piece] = near = near()
        # What nothing enters, and what nothing is left of, needs no map.
        mapped = near == part.count and part.enters is not False and not part.closes
        self.maps[piece] = self.map(part).to(self.dtype) if mapped else self.zeros(self.found.map_shape)
        return self.row(part.row(states, part.last), self.maps[piece])

    def measure(self) -> None:
        """Measure the decays of the part that no other part asks for, while states are on their way."""
        for part in self.mine:
            if self.hooks is not None and part.closes and part.enters is not False:
                state = part.row(self.done[part.piece][1], part.first)
                self.sums[part.piece], self.maps[part.piece] = self.hook("leave", part, state=state, out=None)

    def entered(self, part: _Part, state: Tensor | None, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Return the results of a part that a state enters, and keep that."""
        done = self.done.pop(part.piece, None)
        if state is not None and self.hooks is None:
            kept.copy_(state)
        if done is not None and part.enters is False:
            return done
        if done is None or self.hooks is None:
            return self.again(part, state, done)
        assert state is not None
        y, states = done
        given = {"sums": self.sums.pop(part.piece), "state": state, "move": self.maps[part.piece]}
        final = states if part.pack is None and part.closes else None
        self.hook("enter", part, **given, y=y, final=final, kept=kept)
        if part.pack is not None:
            left = part.row(states, part.first) + given["move"] * state
            states = part.put(states, part.first, left, part.enters)
        return y, states

    def again(self, part: _Part, state: Tensor | None, done: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Compute again what a state reaches; ``done`` are results if zeros enter, and are overwritten."""
        near = part.count if done is None else self.reach[part.piece]
        head = part.some(0, near)
        y_head, passed = self.run(self.given(head, self.initial(head, state)))
        if done is None or near == part.count:
            return y_head, passed
        assert state is not None
        y, states = done
        y[:, :near] = y_head
        inner, outer = (output.axes.replace("k", "b").split() for output in reversed(self.spec.outputs))
        nothing = state * 0.0  # NaN for what is not finite
        for at in [at for at, axis in enumerate(inner) if axis not in outer]:
            nothing = nothing.sum(at, keepdim=True)
        bad = (nothing != 0.0).reshape(len(y), *y.shape[2:])
        spoil(y, bad, near, part.count if part.pack is None else part.entered_end - part.piece.begin)
        states = part.put(states, part.first, torch.add(part.row(states, part.first), state, alpha=0.0), part.enters)
        if part.pack is not None:  # a document that ends within reach
            ended = part.entered_end <= head.piece.end
            states = part.put(states, part.first, part.row(passed, part.first), ended)
        return y, states

    def shape(self, **sizes: int) -> tuple[int, ...]:
        """Return the shape of the states of the rows of a batch; with other sizes where they are given."""
        return shape_of(self.spec.outputs[1].axes, {**self.meta.sizes, "k": self.meta.sizes["b"], **sizes})

    def new(self, shape: Sequence[int]) -> Tensor:
        """Return memory for states on their way."""
        return next(iter(self.arrays.values())).new_empty(shape, dtype=self.dtype)

    def zeros(self, shape: Sequence[int]) -> Tensor:
        """Return zeros as states are kept on their way."""
        return self.new(shape).zero_()

    def map(self, part: _Part) -> Tensor:
        """Return the map of a part: what the tokens make of the states that enter, if each row is one document."""
        if self.carry.kind == "window":
            return self.zeros((self.meta.sizes["b"], 0))
        spec, sizes = self.spec, {**self.meta.sizes, **self.carry.sizes} | {"t": part.count}
        changed: dict[str, Any] = {CU_SEQLENS: None}
        for arg in spec.args:
            if arg.name in spec.outputs[0].alone and arg.optional:
                changed[arg.name] = None
            elif arg.name in (*self.carry.inputs, *spec.outputs[0].alone):
                layout = spec.axes_of(arg, self.meta) or ""
                changed[arg.name] = self.arrays[arg.name].new_zeros(shape_of(layout, sizes))
        start = self.zeros(shape_of(spec.outputs[1].axes, sizes | {"k": sizes["b"]}))
        start = start + 1 if self.carry.kind == "factors" else start + torch.eye(start.shape[-1]).to(start)
        move = self.run(self.given(part, start, **changed))[1]
        if (forgets := self.arrays.get(self.carry.forgets)) is None:
            return move
        return torch.where(forgets[:, part.tokens].any(1), FORGOTTEN, move + 0.0)  # which is no zero below 0

    def look(self, part: _Part) -> int | Callable[[], int]:
        """Return how many of the first tokens a state that enters reaches, at least 1, or what finds out.

        That is up to where its document ends, or until nothing is left of it. A GPU finds out next to what it computes
        when the answer is asked for.
        """
        if self.window is not None:
            return min(part.count, max(self.window, 1))
        looks = getattr(backend_module(self.spec, "torch"), "fading", None)
        if part.enters is False or (looks is None and part.pack is None):
            return part.count
        step = STEPS.get(self.meta.device, 1)
        if self.meta.device != "cuda":
            return _rounded(int(self._reach(part, looks, step)), part.count, step)
        if torch.cuda.is_current_stream_capturing():
            return part.count
        at = next(iter(self.arrays.values())).device
        side = _side(at)
        side.wait_stream(torch.cuda.current_stream(at))

        def answer() -> int:
            with torch.cuda.stream(side):
                return _rounded(int(self._reach(part, looks, step)), part.count, step)

        return answer

    def _reach(self, part: _Part, looks: Callable[..., Tensor | None] | None, step: int) -> Any:
        """Return how many of the first tokens a state that enters reaches, as far as the decays of a quarter tell.

        It is told in steps of some tokens: a GPU adds up along the last axis of a matrix that is not long.
        """
        some, found = min(part.count, max(part.count // 4, 4096)) // step * step, cast(Any, part.count)
        given = dict(zip(self.arrays, self.given(part, None), strict=True)) | self.options
        if looks is not None and some and (log := looks(some, **given)) is not None:
            least = math.log(torch.finfo(self.dtype).eps * NEGLIGIBLE)
            steps = log.to(self.dtype).reshape(len(log), some // step, step, -1).sum(2)
            left = (~(steps.mT.contiguous().cumsum(-1) < least)).flatten(0, -2).any(0).sum() * step
            found = torch.where(left < some, left + (step if step > 1 else 0), found)
        if part.pack is not None:
            found = (part.entered_end - part.piece.begin).clamp(max=found)
        return found

    def hook(self, name: str, part: _Part, **given: Any) -> Any:
        """Run one of `HOOKS` of the backend on a part."""
        assert self.hooks is not None
        names = self.hooks[name].names
        timed = () if part.count == self.tokens else self.found.timed
        given["end"] = part.entered_tokens
        arrays = [
            given[n] if n in given else self.arrays[n][:, part.tokens] if n in timed and self.arrays[n] is not None
            else self.arrays[n] for n in names
        ]  # fmt: skip
        # All else is as it always is for arguments of a signature: made by a call, or in a row.
        others = signature_of([given.get("dy"), given.get("dfinal")], (), "")
        key = name, part.piece.at, part.count, given.get("out") is None, given.get("final") is None, others, NEGLIGIBLE
        if (plan := self.found.plans.get(key)) is None:
            dtype = self.found.results[0][1] if name == "enter" else self.dtype
            least = math.log(torch.finfo(dtype).eps * NEGLIGIBLE)
            named = dict(zip(names, arrays, strict=True))
            plan = self.found.plans[key] = self.hooks[name].plan(**named, **self.options, least=least)
        return plan(*arrays)

    def row(self, state: Tensor | None = None, move: Tensor | None = None) -> Tensor:
        """Return a row of numbers as a rank passes them, with room for a state and a map; with them, if given."""
        count = math.prod(self.found.shape) + math.prod(self.found.map_shape)
        row = self.new((-(-count // ALIGNED) * ALIGNED,))
        if state is not None:
            self.state_in(row).copy_(state)
        if move is not None:
            self.map_in(row).copy_(move)
        return row

    def state_in(self, row: Tensor) -> Tensor:
        """Return the state in a row."""
        shape = self.found.shape
        return row[: math.prod(shape)].view(shape)

    def map_in(self, row: Tensor) -> Tensor:
        """Return the map in a row."""
        at, shape = math.prod(self.found.shape), self.found.map_shape
        return row[at : at + math.prod(shape)].view(shape)

    def told(self, rows: dict[Piece, Tensor], meanwhile: Callable[[], object] = lambda: None) -> dict[Piece, Tensor]:
        """Return the `row` of each run of tokens, as its rank passes it: the one all-gather of a call."""
        own = [rows[piece] if piece in rows else self.row() for piece in self.slots]
        flat = own[0] if len(own) == 1 else torch.cat(own)
        each = all_gather(self.cut, flat, meanwhile).reshape(self.cut.size * len(own), len(own[0])).unbind()
        ranks = [iter(each[at : at + len(own)]) for at in range(0, len(each), len(own))]
        return {piece: next(ranks[piece.rank]) for piece in self.pieces}

    def gradient(self, part: _Part, own: Tensor | None, leaving: Tensor | None) -> Tensor | None:
        """Return the gradient of the final states of a part: of those that end in it, and of what leaves it."""
        if leaving is None:
            return own
        if part.pack is None:
            return leaving
        own = self.zeros(self.shape(k=self.meta.sizes["k"])) if own is None else own
        return part.put(own, part.last, part.row(own, part.last) + leaving, True)

    def passed(self, part: _Part, row: Tensor, state: Tensor | None, *, back: bool = False) -> Tensor:
        """Return the state after a part that told ``row``, from that before; or, ``back``, gradients the other way."""
        own = self.state_in(row)
        if state is None:
            return own
        return own + _pick(part.through, self.moved(part, self.map_in(row), state, back=back))

    def moved(self, part: _Part, move: Tensor, state: Tensor, *, back: bool = False) -> Tensor:
        """Apply the map of a part, or its transpose, to a state."""
        if self.carry.kind == "factors":
            moved = move * state
            if self.arrays.get(self.carry.forgets) is None:
                return moved
            return torch.where((move == 0) & move.signbit(), 0.0, moved)
        if self.carry.kind == "matrix":
            return (move.transpose(-1, -2) if back else move) @ state
        moved = torch.zeros_like(state)
        kept = max(self.window - part.count, 0)  # type: ignore[operator]
        if back:
            moved[..., state.shape[-1] - kept :] = state[..., :kept]
        else:
            moved[..., :kept] = state[..., state.shape[-1] - kept :]
        return moved


def _forward(spec: OpSpec, *inputs: Any) -> Any:
    with torch.no_grad():
        call, x = _Call(spec, inputs), inputs[0]
        (y_shape, y_dtype), (shape, dtype) = call.found.results
        rows = {part.piece: row for part in call.mine if (row := call.left(part)) is not None}
        told = call.told(rows, call.measure)
        parts, finals = list[Tensor](), list[Tensor]()
        kept, state = call.new((len(call.slots), *call.found.shape)), None  # what nothing enters is not read
        for part in call.parts if call.mine else ():
            if part.piece in call.slots:
                y, states = call.entered(part, state, kept[call.slots.index(part.piece)])
                parts.append(y)
                finals.append(_pick(part.own, states.to(dtype)))
            if part is call.mine[-1]:
                break
            state = call.passed(part, told[part.piece], state)
        final = sum(finals[1:], finals[0]) if finals else x.new_zeros(shape, dtype=dtype)
        moves = [call.maps[p] if p in call.maps else call.new(call.found.map_shape) for p in call.slots]
        parts = parts or [x.new_empty((y_shape[0], 0, *y_shape[2:]), dtype=y_dtype)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        reach = [call.reach.get(piece, 0) for piece in call.slots]
        stacked = moves[0][None] if len(moves) == 1 else torch.stack(moves)
        return y, final, kept, stacked, torch.tensor([*call.lengths, *reach])


def _backward(
    spec: OpSpec, dy: Any, dfinal: Any, kept: Tensor, moves: Tensor, lengths: Tensor, *inputs: Any
) -> list[Tensor]:
    with torch.no_grad():
        call, needs = _Call(spec, inputs[:-1], lengths.tolist()), inputs[-1]
        entering = dict(zip(call.slots, kept, strict=True))
        move = dict(zip(call.slots, moves, strict=True))
        whole = None if dfinal is None else dfinal.to(call.dtype)
        own = {part.piece: None if whole is None else _pick(part.own, whole) for part in call.mine}

        def differentiated(part: _Part, piece: Piece, dstate: Any, wanted: Sequence[bool]) -> list[Tensor]:
            arrays = call.given(part, call.initial(part, entering[piece]))
            given = [call.of(part, dy), dstate]
            return gradients_alone(spec.name, given, arrays, call.found.wide, wanted, call.backend)

        def of_entering(part: _Part) -> Tensor:
            """Return the gradient of the state that enters, without what later parts ask for, and the map."""
            piece = part.piece
            if call.hooks is None:
                near = part.some(0, call.reach[piece])
                ends = None if whole is None else _pick(near.own, whole)
                (dinitial,) = differentiated(near, piece, ends, [arg.name == INITIAL for arg in spec.args])
                return call.row(part.row(dinitial, part.first), move[piece])
            row, ends = call.row(), None
            if (dstate := own[piece]) is not None and part.own is not False:
                ends = part.row(dstate, part.first)
            given = {"state": entering[piece], "move": move[piece], "dy": call.of(part, dy)}
            call.hook("enter_backward", part, **given, dfinal=ends, out=row)
            return row

        told = call.told({part.piece: of_entering(part) for part in call.mine if part.enters is not False})
        leaving, gradient = dict[Piece, Tensor | None](), None
        for part in reversed(call.parts):
            leaving[part.piece] = gradient  # of the state that is open at its end, for later runs
            if not call.mine or part is call.mine[0]:
                break
            gradient = _pick(part.enters, call.passed(part, told[part.piece], gradient, back=True))
        wanted = [(arg, a) for arg, a, need in zip(spec.args, call.arrays.values(), needs, strict=True) if need]
        sums: list[list[Tensor]] = [[] for _ in wanted]
        for part in call.mine:
            # What enters is no argument of this rank.
            foreign = [part.enters is True and arg.name == INITIAL for arg in spec.args]
            dstate = call.gradient(part, own[part.piece], leaving[part.piece])
            some = [need and not other for need, other in zip(needs, foreign, strict=True)]
            found = iter(differentiated(part, part.piece, dstate, some))
            for terms, (arg, a) in zip(sums, wanted, strict=True):
                if arg.name == INITIAL and part.enters is True:
                    terms.append(torch.zeros_like(a, memory_format=torch.contiguous_format))
                    continue
                term = next(found)
                if arg.name == INITIAL:
                    term = part.put(term, part.first, torch.zeros_like(term), part.enters)
                terms.append(term)
        return [_joined(terms, arg, a) for terms, (arg, a) in zip(sums, wanted, strict=True)]


def _joined(terms: list[Tensor], arg: Arg, like: Tensor) -> Tensor:
    """Return the gradient of an argument from those of its runs: of tokens one after the other, else the sum."""
    if len(terms) == 1:
        return terms[0].contiguous()
    if not terms:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    return torch.cat(terms, 1) if arg.timed else torch.stack(terms).sum(0)


def _ask(
    cut: Cut, spec: OpSpec, arrays: dict[str, Any], options: Sequence[Any], writes: int = 1, *, refused: bool
) -> list[int]:
    """Return the tokens of each rank, once it is known that all ranks make the same call: see `agree`."""
    device = next((a.device for a in arrays.values() if isinstance(a, Tensor)), torch.device("cpu"))
    facts = {"the operator": spec.name, "options": tuple(options)} | {
        arg.name: None if refused else _fact(arg, arrays[arg.name], writes) for arg in spec.args
    }
    tokens = 0 if refused else next(iter(arrays.values())).shape[1]
    return agree(cut, spec.name, facts, tokens, device, refused=refused)


def _fact(arg: Arg, array: Tensor | None, writes: int) -> Any:
    if array is None:
        return None
    if arg.name == CU_SEQLENS:  # its values are read only where that does not wait for a device
        return (array // writes).tolist() if array.device.type == "cpu" else tuple(array.shape)
    return (array.dtype, *(size for axis, size in enumerate(array.shape) if axis != 1 or not arg.timed))


def _rounded(tokens: int, count: int, least: int) -> int:
    """Return at most an eighth of a power of two more tokens, so that there are few kinds of calls; or all, if near."""
    step = max(least, 1 << max((tokens - 1).bit_length() - 3, 0))
    near = max(-(-tokens // step), 1) * step
    return near if 2 * near <= count else count


def _named(spec: OpSpec, arrays: Sequence[Any]) -> dict[str, Any]:
    return dict(zip([arg.name for arg in spec.args], arrays, strict=True))


def _wide(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with which final states have the dtype that they are computed in."""
    return options | ({"state_dtype": None} if "state_dtype" in options else {})


def _state_dtype(spec: OpSpec, meta: Meta) -> torch.dtype:
    """Return the dtype of states on their way from rank to rank."""
    _, (_, dtype) = spec.output_metas(replace(meta, options=_wide(dict(meta.options))))
    return getattr(torch, dtype)  # type: ignore[no-any-return]


def _described(
    spec: OpSpec, arrays: dict[str, Any], options: dict[str, Any], backend: str
) -> tuple[Meta, Carry, ModuleType]:
    """Check the arguments of this rank, which may have no tokens; return what is known of them."""
    if spec.carry is None:
        raise ArgumentError(f"{spec.name}: it computes each token alone. Call it without group.")
    if options.get("reverse"):
        raise ArgumentError(
            f"{spec.name}: with group, time runs forward; got reverse=True. Flip the tokens, and the order of ranks."
        )
    meta = meta_of(spec, "torch", list(arrays.values()), list(options.values()))
    meta = spec.validate(with_tokens(spec, meta))
    return meta, spec.carry(meta), resolve(spec, meta, backend)


def with_tokens(spec: OpSpec, meta: Meta) -> Meta:
    """Give a rank that has no tokens one, for checks that need some."""
    one = {
        arg.name: a
        for arg in spec.args
        if (a := meta.arrays.get(arg.name)) and {"t", "s"} & {*arg.axes[0].split()} and a.shape[1:2] == (0,)
    }
    some = {name: replace(a, shape=(a.shape[0], 1, *a.shape[2:])) for name, a in one.items()}
    return replace(meta, arrays={**meta.arrays, **some})


def _map_shape(spec: OpSpec, meta: Meta, carry: Carry) -> tuple[int, ...]:
    """Return the shape of the maps of a run of tokens."""
    if carry.kind == "window":
        return meta.sizes["b"], 0
    return shape_of(spec.outputs[1].axes, {**meta.sizes, "k": meta.sizes["b"], **carry.sizes})


def _forward_fake(spec: OpSpec, *inputs: Any) -> Any:
    count = len(spec.args)
    x, options = inputs[0], spec.unwritten_options(inputs[count:-5])
    named = dict(zip([o.name for o in spec.options], options, strict=True))
    meta, carry, _ = _described(spec, _named(spec, inputs[:count]), named, inputs[-5])
    cut, dtype = cut_of_node(*inputs[-4:-1]), _state_dtype(spec, meta)
    (shape, y_dtype), (states, state_dtype) = spec.output_metas(meta)
    rows = shape_of(spec.outputs[1].axes, {**meta.sizes, "k": meta.sizes["b"]})
    return (
        x.new_empty((shape[0], x.shape[1], *shape[2:]), dtype=getattr(torch, y_dtype)),
        x.new_empty(states, dtype=getattr(torch, state_dtype)),
        x.new_empty((cut.runs, *rows), dtype=dtype),
        x.new_empty((cut.runs, *_map_shape(spec, meta, carry)), dtype=dtype),
        x.new_empty((cut.size + cut.runs,), dtype=torch.int64, device="cpu"),
    )


def _backward_fake(spec: OpSpec, *given: Any) -> list[Tensor]:
    arrays, needs = given[5 : 5 + len(spec.args)], given[-1]
    return [a.new_empty(a.shape) for a, need in zip(arrays, needs, strict=True) if need]


_DIRECT: dict[str, Any] = {}
"""Functions of autograd, and what they run, for calls at which nothing looks: the dispatcher takes longer."""


def _differentiate(spec: OpSpec, run: Callable[..., Any], run_backward: Callable[..., list[Tensor]]) -> None:
    count, name, plain = len(spec.args), f"{spec.name}_ranks", apart_from_autocast(run_backward)

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*output[2:], *inputs[:count])
        ctx.options = inputs[count:]
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, *_: Any) -> tuple[Any, ...]:
        needs = [need and arg.differentiable for need, arg in zip(ctx.needs_input_grad, spec.args, strict=False)]
        # With gradients enabled (create_graph), the node says that there is no second derivative.
        direct = not (private.watched() or torch.is_grad_enabled()) and is_plain((dy, dfinal), ())
        found = (plain if direct else OPS[f"{name}_backward"])(dy, dfinal, *ctx.saved_tensors, *ctx.options, needs)
        gradients = iter(found)
        return tuple(next(gradients) if need else None for need in needs) + (None,) * len(ctx.options)

    def forward(ctx: Any, *inputs: Any) -> Any:
        results = run(*inputs)
        setup_context(ctx, inputs, results)
        return results

    differentiate(name, backward, setup_context)
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward), "run": staticmethod(run)}
    _DIRECT[spec.name] = type(name, (torch.autograd.Function,), members)


def _register(spec: OpSpec) -> None:
    arrays = ", ".join(f"Tensor{'?' if a.optional else ''} {a.name}" for a in spec.args)
    options = "".join(f", {o.schema} {o.name}" for o in spec.options)
    inputs = f"{arrays}{options}, str backend, str group, int[] lengths, str layout, int writes"
    name, kept = f"{spec.name}_ranks", "Tensor kept, Tensor moves, Tensor told"
    results = "(Tensor, Tensor, Tensor, Tensor, Tensor)"
    forward, backward = partial(_forward, spec), partial(_backward, spec)
    OPS[name] = define(name, f"({inputs}) -> {results}", forward, partial(_forward_fake, spec), padded=True)
    OPS[f"{name}_backward"] = define(
        f"{name}_backward",
        f"(Tensor? dy, Tensor? dfinal, {kept}, {inputs}, bool[] needs) -> Tensor[]",
        backward,
        partial(_backward_fake, spec),
        padded=True,
    )
    refuse_derivative(f"{name}_backward")
    _differentiate(spec, forward, backward)


for _spec in all_specs():
    if _spec.carry is not None:
        _register(_spec)
