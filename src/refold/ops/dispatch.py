"""The entry of every operator: the arrays decide the framework, and ``backend=`` decides within the framework.

`explain` shows the answers that `refold.ops.backends.resolve` acts on.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from refold.errors import ArgumentError, BackendUnsupported
from refold.ops.arrays import framework_of, framework_of_type, keyword_arguments, meta_of
from refold.ops.backends import named, refusal, resolve
from refold.ops.spec import CU_SEQLENS, OpSpec, check_cu_seqlens_values, load


class Explanation(dict[str, str | None]):
    """Every backend with None for yes or its reason for no, in order of preference; prints as a table."""

    def __init__(self, op: str, reasons: dict[str, str | None]) -> None:
        super().__init__(reasons)
        self.op = op

    @property
    def chosen(self) -> str | None:
        """The backend that would run."""
        return next((name for name, reason in self.items() if reason is None), None)

    def __str__(self) -> str:
        """Return one line per backend."""
        lines = [f"{self.op}:"]
        for name, reason in self.items():
            mark = "runs" if name == self.chosen else "yes" if reason is None else f"no: {reason}"
            lines.append(f"  {name:<10} {mark}")
        return "\n".join(lines)

    __repr__ = __str__


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Say for each backend whether it can run these arguments, and why not.

    Args:
        op: Name of an operator or step, such as ``"ssd"``.
        *args: What one would pass to that operator.
        **kwargs: Its keyword arguments.

    Returns:
        A mapping from backend to None (yes) or the reason; printing it shows a table.

    Raises:
        ArgumentError: There is no such operator, or the operator could not be called so.

    Example:
        >>> import numpy as np, refold
        >>> x = np.ones((1, 8, 4))
        >>> refold.ops.explain("linear_scan", x, x).chosen
        'reference'
    """
    import inspect

    spec = load(op)
    try:
        bound = inspect.signature(spec.public).bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(f"explain: {error}. Pass what you would pass to {op}") from None
    bound.apply_defaults()
    arrays = [bound.arguments[arg.name] for arg in spec.args]
    options = spec.plain_options([bound.arguments[option.name] for option in spec.options])
    framework = framework_of(spec, arrays)
    meta = spec.validate(meta_of(spec, framework, arrays, options))
    return Explanation(op, {backend: refusal(spec, backend, meta) for backend in spec.backends})


def call(spec: OpSpec, arrays: Sequence[Any], options: Sequence[Any], backend: str | None, group: Any = None) -> Any:
    """Run an operator: its public function hands over its arguments here, in the order of the spec."""
    if group is not None:
        return _call_on_ranks(spec, arrays, options, backend, group)
    if framework_of_type(type(arrays[0])) == "torch":
        # One look at one array leads there. Checks of all arrays and the choice of backend follow once per signature,
        # and out of sight of what traces calls.
        from refold.ops.torch import registry

        return registry.run(spec.name, arrays, options, named(spec, backend))
    framework, options = framework_of(spec, arrays), spec.plain_options(options)
    meta = spec.validate(meta_of(spec, framework, arrays, options))
    run = getattr(resolve(spec, meta, named(spec, backend)), spec.name)
    keywords = keyword_arguments(spec, arrays, options)
    if 0 in arrays[0].shape:  # of what was checked, only a batch can be empty
        zeros = import_module("jax.numpy" if framework == "jax" else "numpy").zeros
        empty = tuple(zeros(shape, dtype) for shape, dtype in spec.output_metas(meta))
        return empty if len(empty) > 1 else empty[0]
    if framework == "numpy":
        if (offsets := keywords.get(CU_SEQLENS)) is not None:
            check_cu_seqlens_values(spec.name, offsets.tolist(), meta.sizes["t"])
        results = run(**keywords)
        single = not isinstance(results, tuple)
        cast = tuple(
            r.astype(d) for r, (_, d) in zip((results,) if single else results, spec.output_metas(meta), strict=True)
        )
        return cast[0] if single else cast
    from refold.ops.jax.meshes import run_on_mesh

    return run_on_mesh(spec, meta, run, keywords)


def _call_on_ranks(spec: OpSpec, arrays: Sequence[Any], options: Sequence[Any], backend: str | None, group: Any) -> Any:
    if (framework := framework_of_type(type(arrays[0]))) != "torch":
        raise ArgumentError(
            f"{spec.name}: group is for tensors of PyTorch; got {framework or type(arrays[0]).__name__}. In JAX, shard "
            "the arrays over a mesh (docs/jax.md)."
        )
    from refold.ops.torch import ranks

    return ranks.run(spec, arrays, options, named(spec, backend), group)


def call_in_place(spec: OpSpec, arrays: Sequence[Any], options: Sequence[Any], backend: str | None) -> Any:
    """Run the twin of an operator that overwrites ``spec.updates``, and return the other result."""
    if framework_of_type(type(arrays[0])) == "torch":
        from refold.ops.torch import registry

        return registry.run(f"{spec.name}_", arrays, options, named(spec, backend))
    if framework_of(spec, arrays) == "jax":
        raise BackendUnsupported(f"{spec.name}_: jax arrays cannot be written. Use {spec.name} and keep its state.")
    written = arrays[spec.updates_at]
    if not written.flags.writeable:
        raise ArgumentError(f"{spec.name}_: {spec.updates} is read-only. Pass {spec.updates}.copy().")
    y, state = call(spec, arrays, options, backend)
    written[...] = state
    return y
