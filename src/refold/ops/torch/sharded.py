"""Operators on DTensors: each device computes its own rows, heads or channels.

Along an axis of ``OpSpec.splits`` a call falls into calls that know nothing of each other. Arguments that have this
axis are sharded along it, or are replicated and cut here, which moves nothing between devices. All others are
replicated; their gradients are partial sums. Any other placement is an error, because it would need communication that
only the caller can place well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from refold.errors import ArgumentError
from refold.ops.arrays import meta_of
from refold.ops.spec import CU_SEQLENS, MAY_BE_EMPTY, Arg, OpSpec, letters_of, shape_of

_REMEDY = (
    "Redistribute it, as in x.redistribute(placements=[Replicate()]), or call the operator in "
    "torch.distributed.tensor.experimental.local_map."
)


def given(arrays: Sequence[Any]) -> bool:
    """Whether an argument is a DTensor."""
    return "DTensor" in [type(a).__name__ for a in arrays]  # its module is imported only where there is one


def run(
    spec: OpSpec, op: str, arrays: Sequence[Any], options: Sequence[Any], call: Callable[[Sequence[Any]], Any]
) -> Any:
    """Return the results of ``call``, of the arrays that this device holds, as DTensors.

    Raises:
        ArgumentError: An argument is no DTensor, is on another mesh, or is placed in a way that separates what belongs
            together.
    """
    from torch.distributed.tensor import DTensor

    for arg, a in zip(spec.args, arrays, strict=True):
        if a is not None and not isinstance(a, DTensor):
            raise ArgumentError(
                f"{op}: {arg.name} must be a DTensor as other arguments are; got a {type(a).__name__}. Distribute it, "
                "as in distribute_tensor(x, mesh, [Replicate()])."
            )
    mesh = next(a for a in arrays if a is not None).device_mesh
    for arg, a in zip(spec.args, arrays, strict=True):
        if a is not None and a.device_mesh != mesh:
            raise ArgumentError(f"{op}: {arg.name} is on another mesh than the other arguments. {_REMEDY}")
    meta = spec.validate(meta_of(spec, "torch", arrays, spec.plain_options(options)))
    letters = [
        () if a is None else _spelled(spec.axes_of(arg, meta) or "", meta)
        for arg, a in zip(spec.args, arrays, strict=True)
    ]
    axes = [_axis(spec, op, arrays, letters, dim) for dim in range(mesh.ndim)]
    local = [
        None if a is None else _local(op, arg, a, own, axes)
        for arg, a, own in zip(spec.args, arrays, letters, strict=True)
    ]
    results = call(local)
    many = results if isinstance(results, tuple) else (results,)
    found = []
    for output, result in zip(spec.outputs, many, strict=False):
        shape = torch.Size(shape_of(output.axes, meta.sizes))
        own = _spelled(output.axes, meta)
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        placements = [_placement(own, axis) for axis in axes]
        found.append(DTensor.from_local(result, mesh, placements, run_check=False, shape=shape, stride=strides))
    return tuple(found) if isinstance(results, tuple) else found[0]


def _spelled(axes: str, meta: Any) -> tuple[str, ...]:
    """Return the letter of each axis of an array; without a pack, sequences are rows."""
    row = "k" if CU_SEQLENS in meta.arrays else "b"
    return tuple(row if letter == "k" else letter for letter in letters_of(axes, meta.sizes))


def _axis(
    spec: OpSpec, op: str, arrays: Sequence[Any], letters: Sequence[tuple[str, ...]], dim: int
) -> tuple[str, str] | None:
    """Return the axis that a dimension of the mesh cuts, with the axis of its groups; None if all is replicated."""
    found: dict[str, str] = {}
    for arg, a, own in zip(spec.args, arrays, letters, strict=True):
        if a is None or a.placements[dim].is_replicate():
            continue
        placement = a.placements[dim]
        letter = own[placement.dim] if placement.is_shard() and type(placement).__name__ == "Shard" else ""
        if letter == "g":
            letter = spec.splits[-1]
        if letter.rstrip("0123456789") not in spec.splits:
            raise ArgumentError(
                f"{op}: {arg.name} is placed as {placement!r} on dimension {dim} of the mesh; it may be replicated, or "
                f"sharded along {' or '.join(spec.splits)}. {_REMEDY}"
            )
        found[letter] = arg.name
    if len(found) > 1:
        both = " and ".join(f"{name} along {letter}" for letter, name in found.items())
        raise ArgumentError(f"{op}: dimension {dim} of the mesh shards {both}. {_REMEDY}")
    if not found:
        return None
    (axis,) = found
    groups = "g" if axis == spec.splits[-1] else axis
    sizes = {letter: size for a, own in zip(arrays, letters, strict=True) if a is not None
             for letter, size in zip(own, a.shape, strict=True)}  # fmt: skip
    count = next(a for a in arrays if a is not None).device_mesh.size(dim)
    if sizes.get("g", 1) == 1:
        groups = axis
    for letter in {axis, groups}:
        if letter[0] not in MAY_BE_EMPTY and sizes[letter] % count:
            raise ArgumentError(
                f"{op}: {sizes[letter]} entries of axis {letter} do not divide among {count} devices. {_REMEDY}"
            )
    return axis, groups


def _placement(own: tuple[str, ...], axis: tuple[str, str] | None) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    at = [i for i, letter in enumerate(own) if axis is not None and letter in axis]
    return Shard(at[0]) if at else Replicate()


def _local(op: str, arg: Arg, a: Any, own: tuple[str, ...], axes: Sequence[tuple[str, str] | None]) -> Any:
    """Take the part of an argument that this device holds, cut where the others are."""
    from torch.distributed.tensor import Partial

    wanted = [_placement(own, axis) for axis in axes]
    if list(a.placements) != wanted:
        if op.endswith("_") and arg.name == "state":
            raise ArgumentError(f"{op}: state is written in place and must be placed as {wanted}; got {a.placements}.")
        a = a.redistribute(placements=wanted)
    gradients = [
        Partial() if axis is not None and p.is_replicate() else p for p, axis in zip(wanted, axes, strict=True)
    ]
    return a.to_local(grad_placements=gradients)
