"""The delta rule in chunks, in the spellings of public code, with near misses that are none."""

import torch
import torch.nn.functional as F

CHUNK = 4


def _inverse(lower, how):
    """Invert I + lower, whose diagonal and upper half do not count."""
    size = lower.shape[-1]
    if how == "solve":
        eye = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower)
        return torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
    x = -lower.tril(-1)
    for i in range(1, size):
        row, above = x[..., i, :i].clone(), x[..., :i, :i].clone()
        x[..., i, :i] = row + (row.unsqueeze(-1) * above).sum(-2)
    return x + torch.eye(size, dtype=lower.dtype, device=lower.device)


def _pairs(a, b, g, keyed):
    """Multiply all rows of two arrays, with the decays between them; zeros above the diagonal."""
    size = a.shape[-2]
    above = torch.ones(size, size, dtype=torch.bool, device=a.device).triu(1)
    if g is None:
        return (a @ b.transpose(-1, -2)).masked_fill(above, 0)
    if keyed:
        between = (g.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(above[..., None], -torch.inf).exp()
        return (a.unsqueeze(-2) * b.unsqueeze(-3) * between).sum(-1)
    between = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(above, -torch.inf).exp()
    return a @ b.transpose(-1, -2) * between


def chunked(q, k, v, g, beta, state=None, *, how="solve", inside=False, wrong=""):
    """Return outputs ``(b, t, h, p)`` and the last state ``(b, h, n, p)``.

    Args:
        q: Queries ``(b, t, h, n)``, as are keys k; values v are ``(b, t, h, p)``.
        k: See q.
        v: See q.
        g: Log decays, ``(b, t, h)``, ``(b, t, h, n)`` or None.
        beta: Strengths ``(b, t, h)``.
        state: The state before the first token.
        how: How the matrix of a chunk is inverted: ``solve``, or row after ``rows``.
        inside: Whether strengths and the scale of queries are multiplied in chunks, not before.
        wrong: What is left out.
    """
    tokens, keyed = q.shape[1], g is not None and g.dim() == 4
    q, k, v, beta = (x.transpose(1, 2) for x in (q, k, v, beta))
    pad = -tokens % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
    beta, scale = F.pad(beta, (0, pad)), q.shape[-1] ** -0.5
    q = q if inside else q * scale

    def cut(x):
        return x.reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:])

    if inside:
        q, strength = cut(q) * scale, cut(beta)[..., None]
        k, v = cut(k), cut(v)
        k_beta, v_beta = k * strength, v * strength
    else:
        k_beta, v_beta = (cut(x * beta.unsqueeze(-1)) for x in (k, v))
        q, k, v = map(cut, (q, k, v))
    if wrong == "values":
        v_beta = v
    grown = since = one = None
    if g is not None:
        g = F.pad(g.transpose(1, 2), (0, 0, 0, pad) if keyed else (0, pad))
        g = cut(g).cumsum(3)
        grown, since = (x if keyed else x[..., None] for x in (g.exp(), (g[:, :, :, -1:] - g).exp()))
        one = g[:, :, :, -1].exp()[..., None] if keyed else g[:, :, :, -1].exp()[..., None, None]
    inverse = _inverse(_pairs(k_beta, k, g, keyed), how)
    u, w = inverse @ v_beta, inverse @ (k_beta if g is None else k_beta * grown)
    within = _pairs(q, k, g, keyed)
    if wrong == "state":
        one = None
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state
    out = torch.zeros_like(u)
    for i in range(q.shape[2]):
        new = u[:, :, i] - w[:, :, i] @ state
        read = q[:, :, i] if g is None else q[:, :, i] * grown[:, :, i]
        out[:, :, i] = read @ state + within[:, :, i] @ new
        write = k[:, :, i] if g is None or wrong == "write" else k[:, :, i] * since[:, :, i]
        state = (state if one is None else state * one[:, :, i]) + write.transpose(-1, -2) @ new
    out = out.reshape(*out.shape[:2], -1, out.shape[-1])[:, :, :tokens]
    return out.transpose(1, 2).contiguous(), state


def inputs(tokens, decay="head", n=3, p=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (0.5 * torch.randn(2, tokens, 2, size, generator=draw) for size in (n, n, p))
    beta = torch.rand(2, tokens, 2, generator=draw)
    shape = {"head": (2, tokens, 2), "key": (2, tokens, 2, n)}.get(decay)
    return q, k, v, None if shape is None else -torch.rand(shape, generator=draw), beta
