"""Derivatives that mind values that are not finite, in forward and in reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from refold.ops.jax.layout import Array


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
