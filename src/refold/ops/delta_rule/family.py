"""The layers of the family under their own names: each passes its arguments on to `refold.ops.delta_rule`.

Two of them write more than once per token. They are a delta rule over as many tokens as there are writes: the decay
belongs to the first write of a token, the query to the last.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, Generic, TypedDict, Unpack

from refold.errors import ArgumentError, RefoldError, ShapeError
from refold.ops.arrays import Array, framework_of, framework_of_type, meta_of
from refold.ops.delta_rule import delta_rule
from refold.ops.delta_rule.spec import SPEC
from refold.ops.spec import Arg, Meta, OpSpec

__all__ = ["delta_product", "gated_delta_rule", "gla", "kda", "rwkv7"]

_STATES = SPEC.args[-2:]
_KEYED, _OF_HEADS, _VALUED = ("b t g n",), ("b t h n",), ("b t h p",)
RWKV7 = replace(
    SPEC,
    name="rwkv7",
    args=(
        Arg("q", _KEYED), Arg("w", _OF_HEADS), Arg("k", _KEYED), Arg("v", _VALUED), Arg("a", _OF_HEADS),
        Arg("b", _KEYED), *_STATES,
    ),
)  # fmt: skip


def _multiple(meta: Meta) -> Iterator[str]:
    if meta.sizes["s"] % meta.sizes["t"]:
        yield (
            f"k must have a multiple of the t={meta.sizes['t']} tokens of q; got {meta.sizes['s']}. Pass the keys of "
            "all writes of a token one after the other."
        )
    yield from SPEC.constraints(meta)


DELTA_PRODUCT = replace(
    SPEC,
    name="delta_product",
    args=(
        Arg("q", _KEYED), Arg("k", ("b s g n",)), Arg("v", ("b s h p",)), Arg("g", ("b t h", "b t h n"), optional=True),
        Arg("beta", ("b s h",), optional=True), Arg("r", ("b s h n",), optional=True), *_STATES,
    ),
    constraints=_multiple,
)  # fmt: skip
"""The arguments of layers that change them before they pass them on; ``s`` counts the writes of all tokens."""


class FamilyArguments(TypedDict, Generic[Array], total=False):
    """The arguments of `refold.ops.delta_rule` that the layers of the family leave as they are."""

    A_log: Array
    dt_bias: Array
    initial_state: Array
    cu_seqlens: Any
    scale: float | None
    normalize: bool
    lower_bound: float | None
    beta_limit: float | None
    chunk_size: int | None
    group: object
    backend: str | None


def gated_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, **options: Unpack[FamilyArguments[Array]]
) -> tuple[Array, Array]:
    """Compute the gated delta rule of gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo-hybrid).

    ``S = exp(g) S; S = S + k ⊗ beta (v - Sᵀk); y = scale Sᵀq``, with one decay per head.

    Args:
        q: Queries, ``(b, t, g, n)``; head ``i`` reads group ``i // (h / g)``.
        k: Keys, ``(b, t, g, n)``.
        v: Values, ``(b, t, h, p)``.
        g: Log decays, ``(b, t, h)``, or with ``A_log`` the gates that they come from.
        beta: Strengths, ``(b, t, h)``.
        **options: Those of `refold.ops.delta_rule`: ``normalize=True`` for keys of length one, ``initial_state``, ...

    Returns:
        ``(y, state)`` as `refold.ops.delta_rule`.

    Raises:
        ShapeError: ``g`` is not one per head.

    References:
        Yang, Kautz & Hatamizadeh, "Gated Delta Networks", 2024, arXiv:2412.06464.

    Example:
        >>> import numpy as np
        >>> from refold.ops import gated_delta_rule
        >>> x, gate = np.ones((1, 9, 2, 4)), np.zeros((1, 9, 2))
        >>> y, state = gated_delta_rule(x, x, x, gate, gate + 0.5, normalize=True)
        >>> y.shape, state.shape
        ((1, 9, 2, 4), (1, 2, 4, 4))
    """
    _expect("gated_delta_rule", g, 3, "(b, t, h)")
    return delta_rule(q, k, v, g=g, beta=beta, **options)


def kda(
    q: Array, k: Array, v: Array, g: Array, beta: Array, **options: Unpack[FamilyArguments[Array]]
) -> tuple[Array, Array]:
    """Compute Kimi delta attention: the gated delta rule with one decay per key.

    Args:
        q: Queries, ``(b, t, g, n)``; head ``i`` reads group ``i // (h / g)``.
        k: Keys, ``(b, t, g, n)``.
        v: Values, ``(b, t, h, p)``.
        g: Log decays, ``(b, t, h, n)``, or with ``A_log`` or ``lower_bound`` the gates that they come from.
        beta: Strengths, ``(b, t, h)``.
        **options: Those of `refold.ops.delta_rule`.

    Returns:
        ``(y, state)`` as `refold.ops.delta_rule`.

    Raises:
        ShapeError: ``g`` is not one per key.

    References:
        Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025, arXiv:2510.26692.

    Example:
        >>> import numpy as np
        >>> from refold.ops import kda
        >>> x = np.ones((1, 9, 2, 4))
        >>> y, state = kda(x, x, x, x, np.full((1, 9, 2), 0.5), normalize=True, lower_bound=-5.0)
        >>> y.shape, state.shape
        ((1, 9, 2, 4), (1, 2, 4, 4))
    """
    _expect("kda", g, 4, "(b, t, h, n)")
    return delta_rule(q, k, v, g=g, beta=beta, **options)


def gla(
    q: Array, k: Array, v: Array, g: Array | None = None, **options: Unpack[FamilyArguments[Array]]
) -> tuple[Array, Array]:
    """Compute gated linear attention: ``S = exp(g) S + k ⊗ v; y = scale Sᵀq``; nothing is erased.

    Args:
        q: Queries, ``(b, t, g, n)``; head ``i`` reads group ``i // (h / g)``.
        k: Keys, ``(b, t, g, n)``.
        v: Values, ``(b, t, h, p)``.
        g: Log decays, ``(b, t, h, n)``; ``(b, t, h)`` for one per head; None for linear attention.
        **options: Those of `refold.ops.delta_rule`.

    Returns:
        ``(y, state)`` as `refold.ops.delta_rule`.

    References:
        Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", 2023, arXiv:2312.06635.

    Example:
        >>> import numpy as np
        >>> from refold.ops import gla
        >>> x = np.ones((1, 3, 1, 1))
        >>> gla(x, x, x, np.log(0.5) * x)[0].ravel().tolist()
        [1.0, 1.5, 1.75]
    """
    return delta_rule(q, k, v, g=g, erase=False, **options)


def delta_product(
    q: Array, k: Array, v: Array, g: Array, beta: Array, **options: Unpack[FamilyArguments[Array]]
) -> tuple[Array, Array]:
    """Compute DeltaProduct: m delta rules per token, one after the other, and one query after the last.

    Args:
        q: Queries, ``(b, t, g, n)``.
        k: Keys, ``(b, t m, g, n)``; those of one token follow each other.
        v: Values, ``(b, t m, h, p)``.
        g: Log decays of the tokens, ``(b, t, h)`` or ``(b, t, h, n)``, or None. A token decays once, before it writes.
        beta: Strengths, ``(b, t m, h)``.
        **options: Those of `refold.ops.delta_rule`, but the gates ``A_log``, ``dt_bias`` and ``lower_bound``.

    Returns:
        ``(y, state)``: ``y`` ``(b, t, h, p)``; ``state`` ``(b, h, n, p)``.

    Raises:
        ShapeError: The number of keys is not a multiple of that of queries.
        ArgumentError: A gate is given; decays of tokens alone can be spread over their writes.

    References:
        Siems et al., "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products", 2025,
        arXiv:2502.10297.

    Example:
        >>> import numpy as np
        >>> from refold.ops import delta_product
        >>> q, k, beta = np.ones((1, 5, 1, 4)), np.ones((1, 10, 1, 4)), np.ones((1, 10, 1))
        >>> y, state = delta_product(q, k, k, None, beta, normalize=True)
        >>> y.shape, state.shape
        ((1, 5, 1, 4), (1, 1, 4, 4))
    """
    _check(DELTA_PRODUCT, {"q": q, "k": k, "v": v, "g": g, "beta": beta}, options, "A_log", "dt_bias", "lower_bound")
    writes = max(k.shape[1] // max(q.shape[1], 1), 1)  # a rank may have no tokens
    between = writes - 1
    q, g = _spread(q, between, before=True), None if g is None else _spread(g, between, before=False)
    return _last(writes, *delta_rule(q, k, v, g=g, beta=beta, **_longer(options, writes)))


def rwkv7(
    q: Array, w: Array, k: Array, v: Array, a: Array, b: Array, **options: Unpack[FamilyArguments[Array]]
) -> tuple[Array, Array]:
    """Compute the recurrence of RWKV-7, the diagonal plus a matrix of rank one, with an unconditional write.

    ``S[t] = exp(w[t]) S[t-1] + b[t] ⊗ (S[t-1]ᵀ a[t]) + k[t] ⊗ v[t]; y[t] = scale S[t]ᵀ q[t]``. That is a delta rule
    with the key ``b`` and the read key ``-a exp(-w)``, followed by a write of ``v`` under ``k``: two writes per token.

    Args:
        q: Receptances, ``(b, t, h, n)``.
        w: Log decays, ``(b, t, h, n)``, at least -0.61 in RWKV-7; below -80 their inverses overflow.
        k: Keys, ``(b, t, h, n)``.
        v: Values, ``(b, t, h, p)``.
        a: What is read, ``(b, t, h, n)``; the negative of a key of length one in RWKV-7.
        b: Where that is written, ``(b, t, h, n)``.
        **options: Those of `refold.ops.delta_rule`, but gates and ``normalize``. The scale is 1 if it is not given.

    Returns:
        ``(y, state)`` as `refold.ops.delta_rule`.

    Raises:
        ShapeError: ``w`` is not one per key.
        ArgumentError: A gate or ``normalize`` is given.

    References:
        Peng et al., "RWKV-7 'Goose' with Expressive Dynamic State Evolution", 2025, arXiv:2503.14456.

    Example:
        >>> import numpy as np
        >>> from refold.ops import rwkv7
        >>> x = np.full((1, 9, 2, 4), 0.5)
        >>> y, state = rwkv7(x, -x, x, x, -x, x)
        >>> y.shape, state.shape
        ((1, 9, 2, 4), (1, 2, 4, 4))
    """
    given = {"q": q, "w": w, "k": k, "v": v, "a": a, "b": b}
    _check(RWKV7, given, options, "A_log", "dt_bias", "lower_bound", "normalize")
    xp = _namespace(k)
    read = _spread(xp.negative(a) * xp.exp(xp.negative(w)), 1, before=False)
    keys, values = _interleave(b, k), _spread(v, 1, before=True)
    q, w = _spread(q, 1, before=True), _spread(w, 1, before=False)
    options.setdefault("scale", 1.0)
    return _last(2, *delta_rule(q, keys, values, g=w, r=read, **_longer(options, 2)))


def _expect(op: str, g: Any, rank: int, axes: str) -> None:
    if (shape := tuple(getattr(g, "shape", ()))) and len(shape) == rank:
        return
    got = f"shape {shape}" if shape else type(g).__name__
    raise ShapeError(f"{op}: g must have the axes {axes}; got {got}. Reshape g, or use delta_rule.")


def _check(layer: OpSpec, given: dict[str, Any], options: Any, *refused: str) -> None:
    """Check the arguments of a layer under their own names, before they become those of the delta rule.

    Raises:
        ArgumentError: One cannot be taken; other ranks of a group are told so, and raise, too.
    """
    arrays = [given.get(arg.name, options.get(arg.name)) for arg in layer.args]
    group = options.get("group")
    try:
        _refuse(layer.name, options, *refused)
        framework = framework_of(layer, arrays)
        if framework == "torch" and sys.modules["torch"].compiler.is_compiling():
            return  # the delta rule checks what it gets
        values = layer.plain_options([options.get(option.name, option.default) for option in layer.options])
        meta = meta_of(layer, framework, arrays, values)
        if group is not None and framework == "torch":
            meta = _ranks().with_tokens(layer, meta)
        layer.validate(meta)
    except RefoldError:
        if group is not None and "torch" in sys.modules:
            _ranks().refuse(layer, arrays, group)
        raise


def _ranks() -> Any:
    return import_module("refold.ops.torch.ranks")


def _refuse(op: str, options: Any, *names: str) -> None:
    """Refuse what `delta_rule` would compute for each write, where it belongs to a token."""
    for name in names:
        if (given := options.get(name)) is not None and given is not False:
            got = given if isinstance(given, bool | float) else type(given).__name__
            raise ArgumentError(f"{op}: {name} is not taken; got {got}. Compute it before, and leave {name} out.")


def _namespace(array: Any) -> Any:
    """Give the module that has the functions of an array's framework, which is imported: Dynamo traces no imports."""
    framework = framework_of_type(type(array))
    return sys.modules["jax.numpy" if framework == "jax" else framework or "numpy"]


def _interleave(*arrays: Any) -> Any:
    """Let the tokens of arrays (b, t, ...) take turns, (b, t m, ...)."""
    stacked = _namespace(arrays[0]).stack(arrays, 2)
    return stacked.reshape(stacked.shape[0], -1, *stacked.shape[3:])


def _spread(array: Any, zeros: int, before: bool) -> Any:
    """Put tokens of zeros before or after each token."""
    none = [_namespace(array).zeros_like(array)] * zeros
    return _interleave(*(none if before else []), array, *([] if before else none))


def _longer(options: FamilyArguments[Array], writes: int) -> FamilyArguments[Array]:
    """Count offsets, and the tokens of ranks, in writes."""
    found: FamilyArguments[Array] = {**options}
    if (offsets := options.get("cu_seqlens")) is not None:
        found["cu_seqlens"] = offsets * writes
    if (group := options.get("group")) is not None:
        found["group"] = group, writes
    return found


def _last(writes: int, y: Any, state: Any) -> tuple[Any, Any]:
    return y[:, writes - 1 :: writes], state
