"""Derivatives that mind values that are not finite, in forward and in reverse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from refold.ops.jax.layout import Array, line


def careful(
    core: Callable[..., tuple[Array, Array]], find: Callable[..., Any], without: Callable[..., tuple[Array, ...]],
    spoiled_results: Callable[..., tuple[Array, Array]], spoiled_gradients: Callable[..., tuple[Array, ...]],
) -> Any:  # fmt: skip
    """Make a function of any operands of what takes finite ones: it has NaN where the definition has it.

    Args:
        core: Computes y and the final states, of what is static, offsets, and finite operands.
        find: Says where operands are not finite, of what is static and the operands.
        without: Gives the operands with zeros there, of what was found and the operands.
        spoiled_results: Marks results, of how tokens lie in sequences and what was found.
        spoiled_gradients: Marks gradients of operands, of the same and the operands.

    Returns:
        A function of what is static, the operands, and offsets.
    """

    def marked(results: tuple[Array, Array], bad: Any, operands: tuple[Array, ...], cu_seqlens: Array | None) -> Any:
        marks = spoiled_results(line(operands[0].shape[1], cu_seqlens), bad)
        return tuple(jnp.where(mark, jnp.nan, a) for mark, a in zip(marks, results, strict=True))

    @partial(jax.custom_jvp, nondiff_argnums=(0,))
    def run(static: Any, operands: tuple[Array, ...], cu_seqlens: Array | None) -> tuple[Array, Array]:
        bad = find(static, operands)
        return marked(core(static, cu_seqlens, *without(bad, operands)), bad, operands, cu_seqlens)

    @run.defjvp
    def run_jvp(static: Any, primals: Any, tangents: Any) -> Any:
        operands, cu_seqlens = primals
        bad = find(static, operands)
        clean = without(bad, operands)
        results, jacobian = jax.linearize(partial(core, static, cu_seqlens), *clean)

        def transposed(cotangents: tuple[Array, ...]) -> tuple[Array, ...]:
            bad_dy, bad_dfinal = (~jnp.isfinite(a) for a in cotangents)
            tokens = line(operands[0].shape[1], cu_seqlens)  # in `shard_map`, what is solved varies over devices
            marks = spoiled_gradients(tokens, replace(bad, dy=bad_dy, dfinal=bad_dfinal), operands)
            finite = tuple(jnp.where(jnp.isfinite(a), a, 0) for a in cotangents)
            found = jax.linear_transpose(jacobian, *clean)(finite)
            return tuple(jnp.where(mark, jnp.nan, a) for mark, a in zip(marks, found, strict=True))

        results = marked(results, bad, operands, cu_seqlens)
        return results, pushed(tangents[0], results, jacobian, transposed)

    return run


def pushed(
    tangents: tuple[Array, ...],
    results: tuple[Array, ...],
    jacobian: Callable[..., tuple[Array, ...]],
    transposed: Callable[[tuple[Array, ...]], tuple[Array, ...]],
) -> tuple[Array, ...]:
    """Compute the tangents of results by ``jacobian``, such that JAX takes ``transposed`` for their transpose.

    JAX lets a function have a derivative of its own, forward or reverse, but not both. Linear systems may have both, so
    this solves ``(u, v - J u) = (tangents, 0)``, whose v is what is wanted and whose transpose uses that of J.
    """

    def solve(_: Any, right: Any) -> Any:
        given, rest = right
        return given, jax.tree.map(jnp.add, jacobian(*given), rest)

    def solve_transposed(_: Any, right: Any) -> Any:
        given, cotangents = right
        return jax.tree.map(jnp.add, given, transposed(cotangents)), cotangents

    def system(unknowns: Any) -> Any:
        given, found = unknowns
        return given, jax.tree.map(jnp.subtract, found, jacobian(*given))

    # All of the right side has to depend on what JAX differentiates: add a zero that does, whatever its value.
    link: Any = sum(jnp.where(False, a.ravel()[0], 0).astype(results[-1].dtype) for a in tangents)
    right = jax.tree.map(lambda a: a + link.astype(a.dtype), (tangents, jax.tree.map(jnp.zeros_like, results)))
    found: tuple[Array, ...] = jax.lax.custom_linear_solve(system, right, solve, solve_transposed)[1]
    return found
