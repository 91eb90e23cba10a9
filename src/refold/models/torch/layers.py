"""Pieces that the models share. Weights are ``(out, in)``, as checkpoints store them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refold.errors import ArgumentError
from refold.models.configs import Config
from refold.models.counts import state_shapes
from refold.ops.torch.cuts import Cut, agree, pieces, summed

Tree = Any


def init_state(
    config: Config, batch: int, dtype: torch.dtype = torch.float32, state_dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu", capacity: int = 0,
) -> Tree:  # fmt: skip
    """Make the state before any token: zeros, of the shapes of `state_shapes`, for weights and states of two dtypes."""
    dtypes = {"int32": torch.int32, "weights": dtype, "states": state_dtype}
    shapes = state_shapes(config, batch, capacity)
    return {name: torch.zeros(shape, dtype=dtypes[kind], device=device) for name, (shape, kind) in shapes.items()}


def kernels(x: Tensor) -> ModuleType | None:
    """Return the fused kernels if they can run where ``x`` is and nothing needs a gradient."""
    on_gpu = x.is_cuda and not (torch.is_grad_enabled() and x.requires_grad)
    return _with("triton", "refold.models.torch.kernels") if on_gpu else None


def few_rows() -> ModuleType | None:
    """Return the products of a few rows on the CPU if Numba is there to compile them, and no graph is traced."""
    return None if torch.compiler.is_compiling() else _with("numba", "refold.models.torch.few_rows")


@cache
def _with(package: str, name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:
            raise
        return None


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the residual stream and of norms: float32, or float64 for float64 weights."""
    return torch.promote_types(dtype, torch.float32)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` in the weight's dtype."""
    return F.linear(x.to(weight.dtype), weight, bias)


def embed(params: Tree, tokens: Tensor) -> Tensor:
    """Look tokens up; the residual stream is float32 whatever the weights are."""
    embedding = params["embedding"]
    return F.embedding(tokens, embedding).to(wide(embedding.dtype))


def add_norm(
    hidden: Tensor, mixed: Tensor | None, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the residual stream with ``scale * mixed`` added, and its RMS norm in the weight's dtype.

    The stream that is given may be overwritten where nothing needs a gradient.
    """
    if (fused := kernels(hidden)) is not None and not torch.is_grad_enabled():
        return hidden, fused.add_norm_(hidden, mixed, weight, eps, scale)
    if mixed is not None:
        hidden = hidden + (mixed if scale == 1.0 else mixed.to(hidden.dtype) * scale)
    return hidden, rms_norm(hidden, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """Normalise over groups of the last axis, all of it if None; the result has the weight's dtype."""
    x = x.to(wide(weight.dtype))
    groups = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    return ((groups * scale).flatten(-2) * weight).to(weight.dtype)


def rotate(x: Tensor, position: Tensor, theta: float | None, dim: int | None = None) -> Tensor:
    """Rotate the halves of the first ``dim`` of ``x (t, heads, e)`` by angles that grow with ``position (t,)``.

    All of a head is rotated if ``dim`` is None, and nothing if ``theta`` is.
    """
    if theta is None:
        return x
    dim = x.shape[-1] if dim is None else dim
    half = dim // 2
    frequency = 1.0 / theta ** (torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = (position[:, None] * frequency)[:, None]  # (t, 1, e/2)
    first, second, rest = x.split([half, half, x.shape[-1] - dim], -1)
    first, second = first.to(wide(x.dtype)), second.to(wide(x.dtype))
    cos, sin = angle.cos(), angle.sin()
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*(a.to(x.dtype) for a in turned), rest], -1)


def output(params: Tree, normed: Tensor, rows: Rows, kind: str) -> Tensor:
    """Turn the normalised stream into what the caller asked for.

    ``last``: float32 logits after each row's last token, ``(b, vocab)``; ``all``: logits ``(b, t, vocab)``; ``hidden``:
    the normalised stream ``(b, t, d)``. Of what is padding, the results are zeros; of a row without tokens, anything.
    """
    if kind == "last":
        return head(params, rows.last(normed))
    normed = rows.padded(normed)
    return normed if kind == "hidden" else head(params, normed)


def head(params: Tree, normed: Tensor) -> Tensor:
    """Return logits ``(..., vocab)`` of the normalised stream, float32."""
    return linear(normed, params.get("head", params["embedding"])).to(wide(normed.dtype))


def told(group: Any, tokens: Tensor) -> Cut:
    """Ask the ranks of a group for the tokens ``(b, t)`` that each has, if that is not known."""
    cut = group if isinstance(group, Cut) else Cut(group)
    if cut.lengths is not None:
        return cut
    lengths = agree(cut, "forward", {"rows": len(tokens)}, tokens.shape[1], tokens.device, refused=False)
    return Cut(cut.group, tuple(lengths), cut.layout)


@dataclass
class Rows:
    """Rows of tokens of any lengths, as one pack: ``tokens (1, total)``, or ``(b, t)`` where all are equally long.

    Attributes:
        tokens: The tokens that are no padding.
        batch: Number of rows.
        seqlen: Length of the padded rows.
        lengths: Tokens of each row.
        offsets: Where each row begins in the pack, and the end, int32; None if it is no pack.
        place: Place of each token of the pack in the padded rows.
    """

    tokens: Tensor
    batch: int
    seqlen: int
    lengths: list[int]
    offsets: Tensor | None = None
    place: Tensor | None = None
    group: Any = None

    @classmethod
    def of(cls, tokens: Tensor, lengths: Sequence[int] | None, group: Any = None) -> Rows:
        """Take the padding out of ``tokens (b, t)``.

        Raises:
            ArgumentError: There are lengths and a group.
        """
        batch, seqlen = tokens.shape
        if lengths is None or all(n == seqlen for n in lengths):
            return cls(tokens, batch, seqlen, [seqlen] * batch, group=group)
        if group is not None:
            raise ArgumentError(f"forward: with group, rows are equally long; got lengths={lengths}. Read each alone.")
        lengths = [int(n) for n in lengths]
        count = torch.tensor(lengths)
        place = (torch.arange(seqlen) < count[:, None]).flatten().nonzero()[:, 0].to(tokens.device)
        offsets = F.pad(count.cumsum(0), (1, 0)).to(torch.int32).to(tokens.device)
        return cls(tokens.reshape(-1)[place][None], batch, seqlen, lengths, offsets, place)

    def last(self, x: Tensor) -> Tensor:
        """Return the last token of each row of ``x``, as this pack is."""
        if self.offsets is None:
            return x[:, -1]
        return x[0, (self.offsets[1:] - 1).clamp(min=0)]

    def padded(self, x: Tensor) -> Tensor:
        """Return ``x (b, t, ...)`` with zeros for padding."""
        if self.place is None:
            return x
        rows = x.new_zeros(self.batch * self.seqlen, *x.shape[2:])
        return rows.index_put((self.place,), x[0]).unflatten(0, (self.batch, self.seqlen))

    def apart(self, x: Tensor) -> list[Tensor]:
        """Return each row of ``x`` by itself, ``(length, ...)``."""
        return list(x if self.offsets is None else x[0].split(self.lengths))

    def joined(self, rows: list[Tensor]) -> Tensor:
        """Undo `apart`."""
        return torch.stack(rows) if self.offsets is None else torch.cat(rows)[None]

    @property
    def length(self) -> int:
        """The tokens of a row on all ranks."""
        return self.seqlen if self.group is None else sum(self.group.lengths)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Give the places of a row's tokens in the row, which may lie on several ranks."""
        found: Tensor = torch.arange(length, device=device) if self.group is None else self.group.positions(device)
        return found

    def runs(self, length: int) -> list[tuple[int, int]]:
        """Give the tokens of each run of a row's tokens, and where it ends in the row."""
        if self.group is None:
            return [(length, length)]
        own = [p for p in pieces(self.group.lengths, self.group.layout) if p.rank == self.group.rank]
        return [(p.end - p.begin, p.end) for p in sorted(own, key=lambda p: p.at)]

    def grown(self, length: Tensor) -> Tensor:
        """Return how many tokens each row has read, after these."""
        return length + torch.tensor(self.lengths, dtype=length.dtype).to(length.device)

    def after(self, state: Tree, **states: Tensor) -> Tree:
        """Return the state after these tokens; that of all ranks of a group, of which one has each row."""
        if self.group is None:
            return {"length": self.grown(state["length"]), **states}
        cut = self.group if isinstance(self.group, Cut) else Cut(self.group)
        read = summed(cut, self.grown(torch.zeros_like(state["length"])))
        return {"length": state["length"] + read, **{name: summed(cut, a) for name, a in states.items()}}
