"""Operators on meshes with Explicit axes, the default of ``jax.make_mesh``.

There, each operation of JAX has to say how its result is spread over devices, and reshapes and products that leave it
open are refused. The axes of an operator have names. So its results are spread as its arguments are, axis by axis, and
inside, the compiler decides, as it does on meshes with Auto axes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes

from refold.ops.spec import CU_SEQLENS, Meta, OpSpec, letters_of


def run_on_mesh(spec: OpSpec, meta: Meta, run: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a backend's function; on Explicit axes, its results are spread over devices as the arguments are."""
    arrays = {name: arguments[name] for name in meta.arrays}
    shardings = {name: jax.typeof(array).sharding for name, array in arrays.items()}
    mesh = next((s.mesh for s in shardings.values() if AxisType.Explicit in s.mesh.axis_types), None)
    if mesh is None:
        return run(**arguments)
    others = {name: value for name, value in arguments.items() if name not in arrays}
    results = _results(spec, meta, {name: sharding.spec for name, sharding in shardings.items()})
    placed = tuple(NamedSharding(mesh, PartitionSpec(*result)) for result in results)
    inside = auto_axes(
        lambda arrays: run(**arrays, **others),
        axes=tuple(
            name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit
        ),
        out_sharding=placed if len(placed) > 1 else placed[0],
    )
    return inside(arrays)


def _results(spec: OpSpec, meta: Meta, parts: Mapping[str, Any]) -> list[list[Any]]:
    """Return the mesh axes of each result's axes: those of the first argument that has the letter, none twice."""
    over: dict[str, Any] = {}
    for arg in spec.args:
        if arg.name in meta.arrays and arg.name != CU_SEQLENS:
            letters = letters_of(spec.axes_of(arg, meta) or "", meta.sizes)
            for letter, devices in zip(letters, parts[arg.name], strict=False):
                over[letter] = over.get(letter) or devices
    if CU_SEQLENS not in meta.arrays:  # a row is a sequence
        over["k"] = over["b"] = over.get("b") or over.get("k")
    results = []
    for output in spec.outputs:
        taken: set[str] = set()
        result = []
        for letter in letters_of(output.axes, meta.sizes):
            devices = over.get(letter)
            names = set(devices if isinstance(devices, tuple) else (devices,)) - {None}
            result.append(None if names & taken else devices)
            taken |= names
        results.append(result)
    return results
