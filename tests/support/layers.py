"""Recurrent layers and algorithms in the spelling of public code, for random sizes, dtypes, layouts and modes.

`LAYERS` maps a name to a function of a `Sizes`, which returns a function of tensors and its arguments. Each is written
from its definition. Sequences are (batch, time, ...). What a layer returns is a tensor or a tuple of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Layer = tuple[Callable[..., Any], list[Tensor]]


class Sizes:
    """Random sizes, and tensors of them.

    Args:
        r: Where from.
        dtype: Of all floating-point tensors.
        batch: The batch; drawn if None.
        steps: The length; drawn if None.
    """

    def __init__(self, r: Random, dtype: torch.dtype, batch: int | None = None, steps: int | None = None) -> None:
        self.r, self.dtype = r, dtype
        self.b = r.choice([1, 2, 3]) if batch is None else batch
        self.t = r.choice([1, 2, 5, 16, 17, 24, 33]) if steps is None else steps
        self.h, self.k, self.v, self.d = r.choice([1, 2]), r.choice([2, 4]), r.choice([3, 4]), r.choice([4, 6])
        self.generator = torch.Generator().manual_seed(r.randrange(2**30))

    def new(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw a tensor; its axes lie in memory in any order."""
        order = list(range(len(shape)))
        if self.r.random() < 0.4:
            self.r.shuffle(order)
        dense = torch.randn([shape[d] for d in order], generator=self.generator, dtype=torch.float64) * scale
        return dense.to(self.dtype).permute([order.index(d) for d in range(len(shape))])

    def seq(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw a sequence, (batch, time, ...)."""
        return self.new(self.b, self.t, *shape, scale=scale)

    def several(self, count: int, *shape: int) -> list[Tensor]:
        """Draw sequences of one shape."""
        return [self.seq(*shape) for _ in range(count)]

    def mask(self, *shape: int, share: float = 0.7) -> Tensor:
        """Draw truth values, (batch, time, ...)."""
        return torch.rand(self.b, self.t, *shape, generator=self.generator) < share


def min_gru_tokens(s: Sizes) -> Layer:
    def fn(x: Tensor, w: Tensor) -> Any:
        h, out = None, []
        for t in range(x.shape[1]):
            hidden, gate = (x[:, t : t + 1] @ w).chunk(2, -1)
            h = torch.lerp(h, hidden, gate.sigmoid()) if h is not None else hidden * gate.sigmoid()
            h = h[:, -1:]
            out.append(h)
        return torch.cat(out, 1), h

    return fn, [s.seq(s.d), s.new(s.d, 2 * s.d)]


def min_gru_log(s: Sizes) -> Layer:
    def fn(gate: Tensor, hidden: Tensor) -> Tensor:
        log_coeffs, log_z = -F.softplus(gate), -F.softplus(-gate)
        g = torch.where(hidden >= 0, (F.relu(hidden) + 0.5).log(), -F.softplus(-hidden))
        a_star = F.pad(log_coeffs.cumsum(1), (0, 0, 1, 0))
        values = F.pad(log_z + g, (0, 0, 1, 0), value=-10.0)
        return torch.exp(a_star + torch.logcumsumexp(values - a_star, 1))[:, 1:]

    return fn, s.several(2, s.d)


def min_lstm(s: Sizes) -> Layer:
    def fn(f: Tensor, i: Tensor, c: Tensor, h: Tensor) -> Tensor:
        f, i = f.sigmoid(), i.sigmoid()
        f, i = f / (f + i), i / (f + i)
        out = []
        for ft, it, ct in zip(f.unbind(1), i.unbind(1), c.unbind(1), strict=True):
            h = ft * h + it * ct
            out += [h]
        return torch.stack(out, dim=1)

    return fn, [*s.several(3, s.d), s.new(s.b, s.d)]


def rwkv4_plain(s: Sizes) -> Layer:
    def fn(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
        w = -w.exp()
        num = den = torch.zeros_like(k[:, 0])
        y = torch.empty_like(v)
        for t in range(k.shape[1]):
            e = (u + k[:, t]).exp()
            y[:, t] = (num + e * v[:, t]) / (den + e)
            num = w.exp() * num + k[:, t].exp() * v[:, t]
            den = w.exp() * den + k[:, t].exp()
        return y

    return fn, [*s.several(2, s.d), s.new(s.d), s.new(s.d)]


def rwkv4_stable(s: Sizes) -> Layer:
    def fn(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
        w, out = -torch.exp(w), []
        aa = bb = torch.zeros_like(k[:, 0])
        pp = torch.full_like(aa, -1e30 if aa.dtype != torch.float16 else -6e4)
        for t in range(k.shape[1]):
            ww = u + k[:, t]
            p = torch.maximum(pp, ww)
            e1, e2 = (pp - p).exp(), (ww - p).exp()
            out.append((e1 * aa + e2 * v[:, t]) / (e1 * bb + e2))
            ww = pp + w
            p = torch.maximum(ww, k[:, t])
            e1, e2 = (ww - p).exp(), (k[:, t] - p).exp()
            aa, bb, pp = e1 * aa + e2 * v[:, t], e1 * bb + e2, p
        return torch.stack(out, 1)

    return fn, [*s.several(2, s.d), s.new(s.d), s.new(s.d)]


def rwkv5(s: Sizes) -> Layer:
    def fn(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Any:
        B, T, H, N = k.shape
        w, out = torch.exp(-torch.exp(w)).view(H, N, 1), torch.zeros_like(v)
        state = torch.zeros(B, H, N, v.shape[-1], dtype=k.dtype)
        for t in range(T):
            at = k[:, t].unsqueeze(-1) @ v[:, t].unsqueeze(-2)
            out[:, t] = (r[:, t].unsqueeze(-2) @ (u.view(H, N, 1) * at + state)).squeeze(-2)
            state = at + w * state
        return out, state

    return fn, [*s.several(2, s.h, s.k), s.seq(s.h, s.v), s.new(s.h, s.k), s.new(s.h, s.k)]


def rwkv6(s: Sizes) -> Layer:
    def fn(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
        r, k, v, w = (x.transpose(1, 2) for x in (r, k, v, w))
        h = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=torch.float32).to(k)
        o = torch.zeros_like(v)
        for i in range(k.shape[2]):
            kv = k[:, :, i, :, None] * v[:, :, i, None, :]
            o[:, :, i] = ((h + u[None, ..., None] * kv) * r[:, :, i, :, None]).sum(-2)
            h = h * (-w[:, :, i].exp()).exp()[..., None] + kv
        return o.transpose(1, 2)

    return fn, [*s.several(2, s.h, s.k), s.seq(s.h, s.v), s.seq(s.h, s.k), s.new(s.h, s.k)]


def rwkv7(s: Sizes) -> Layer:
    def fn(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> Any:
        kk = F.normalize(k, dim=-1)
        w, out = torch.exp(-0.6 * torch.sigmoid(w)), []
        for t in range(r.shape[1]):
            ab = -kk[:, t].unsqueeze(-1) @ (kk[:, t] * a[:, t].sigmoid()).unsqueeze(-2)
            state = state * w[:, t].unsqueeze(-2) + state @ ab + v[:, t].unsqueeze(-1) @ k[:, t].unsqueeze(-2)
            out.append((state @ r[:, t].unsqueeze(-1)).squeeze(-1))
        return torch.stack(out, 1), state

    return fn, [*s.several(3, s.h, s.k), s.seq(s.h, s.v), s.seq(s.h, s.k), s.new(s.b, s.h, s.v, s.k)]


def mamba1(s: Sizes) -> Layer:
    def fn(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor) -> Tensor:
        delta = F.softplus(delta)
        dA = torch.exp(torch.einsum("bld,dn->bldn", delta, -A.exp()))
        dBu = torch.einsum("bld,bln,bld->bldn", delta, B, u)
        x, ys = torch.zeros(u.shape[0], *A.shape, dtype=u.dtype), []
        for i in range(u.shape[1]):
            x = dA[:, i] * x + dBu[:, i]
            ys.append(torch.einsum("bdn,bn->bd", x, C[:, i]))
        return (torch.stack(ys, dim=1) + u * D) * F.silu(z)

    return fn, [*s.several(2, s.d), s.new(s.d, s.k), *s.several(2, s.k), s.new(s.d), s.seq(s.d)]


def mamba1_slow_forward(s: Sizes) -> Layer:
    def fn(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Any:
        x, dt = x.transpose(1, 2), F.softplus(dt.transpose(1, 2))
        A = -torch.exp(A.float()).to(A)
        discrete_A = torch.exp(A[None, :, None, :] * dt[:, :, :, None])
        deltaB_u = (dt[:, :, :, None] * B[:, None, :, :]) * x[:, :, :, None]
        state = x.new_zeros(x.shape[0], *A.shape)
        scan = []
        for i in range(x.shape[-1]):
            state = discrete_A[:, :, i, :] * state + deltaB_u[:, :, i, :]
            scan.append(torch.matmul(state, C[:, i, :].unsqueeze(-1))[:, :, 0])
        return torch.stack(scan, dim=-1), state

    return fn, [*s.several(2, s.d), s.new(s.d, s.k), *s.several(2, s.k)]


def mamba2_steps(s: Sizes) -> Layer:
    def fn(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Any:
        b, t, h, _ = x.shape
        B, C = (y.repeat_interleave(h, dim=2) for y in (B, C))
        A, dt = -A.exp(), F.softplus(dt)
        state, y = x.new_zeros(b, h, x.shape[-1], B.shape[-1]), []
        for i in range(t):
            dA = (dt[:, i] * A).exp()[..., None, None]
            state = state * dA + (dt[:, i, :, None] * x[:, i])[..., None] * B[:, i, :, None, :]
            y.append((state * C[:, i, :, None, :]).sum(-1) + D[:, None] * x[:, i])
        return torch.stack(y, 1), state

    return fn, [s.seq(s.h, s.v), s.seq(s.h), s.new(s.h), *s.several(2, 1, s.k), s.new(s.h)]


def segsum(x: Tensor) -> Tensor:
    T = x.size(-1)
    x = x[..., None].repeat(*[1] * x.dim(), T)
    x = x.masked_fill(~torch.tril(torch.ones(T, T, dtype=torch.bool), -1), 0)
    out = x.cumsum(-2)
    return out.masked_fill(~torch.tril(torch.ones(T, T, dtype=torch.bool), 0), -torch.inf)


def mamba2_chunks(s: Sizes) -> Layer:
    s.t = max(s.t // 8, 1) * 8

    def fn(X: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Any:
        A = -F.softplus(A)
        X, A, B, C = (x.reshape(x.shape[0], -1, 8, *x.shape[2:]) for x in (X, A, B, C))
        A = A.permute(0, 3, 1, 2)
        A_cumsum = torch.cumsum(A, dim=-1)
        L = torch.exp(segsum(A))
        Y_diag = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, L, X)
        decay = torch.exp(A_cumsum[:, :, :, -1:] - A_cumsum)
        states = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, decay, X)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
        chunk_decay = torch.exp(segsum(F.pad(A_cumsum[:, :, :, -1], (1, 0))))
        new = torch.einsum("bhzc,bchpn->bzhpn", chunk_decay, states)
        states, final = new[:, :-1], new[:, -1]
        Y_off = torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states, torch.exp(A_cumsum))
        return (Y_diag + Y_off).flatten(1, 2), final

    return fn, [s.seq(s.h, s.v), s.seq(s.h), *s.several(2, s.h, s.k)]


def gla(s: Sizes) -> Layer:
    def fn(q: Tensor, k: Tensor, v: Tensor, gk: Tensor, h: Tensor) -> Any:
        q, k, v, gk = (x.transpose(1, 2).float().to(x) for x in (q, k, v, gk))
        o, gk = torch.zeros_like(v), F.logsigmoid(gk) / 16
        for i in range(q.shape[2]):
            kv = k[:, :, i, :, None] * v[:, :, i, None, :]
            h = h * gk[:, :, i].exp()[..., None] + kv
            o[:, :, i] = ((q[:, :, i] * q.shape[-1] ** -0.5)[..., None] * h).sum(-2)
        return o.transpose(1, 2), h

    return fn, [*s.several(2, s.h, s.k), s.seq(s.h, s.v), s.seq(s.h, s.k), s.new(s.b, s.h, s.k, s.v)]


def retention(s: Sizes) -> Layer:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Any:
        gamma = 1 - 2.0 ** (-5 - torch.arange(q.shape[2], dtype=q.dtype))
        state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=q.dtype)
        outputs = []
        for n in range(q.shape[1]):
            state = gamma[:, None, None] * state + k[:, n].unsqueeze(3) * v[:, n].unsqueeze(2)
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, n], state))
        return torch.stack(outputs, 1), state

    return fn, [*s.several(2, s.h, s.k), s.seq(s.h, s.v)]


def retention_parallel(s: Sizes) -> Layer:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = torch.arange(q.shape[1], dtype=q.dtype)
        D = torch.where(n[:, None] >= n, 0.9 ** (n[:, None] - n).clamp(min=0), 0.0)
        return torch.einsum("bthk,bshk,ts,bshv->bthv", q, k, D, v)

    return fn, [*s.several(2, s.h, s.k), s.seq(s.h, s.v)]


def hgrn(s: Sizes) -> Layer:
    def fn(x: Tensor, g: Tensor, lower: Tensor) -> Any:
        f = lower.sigmoid() + (1 - lower.sigmoid()) * g.sigmoid()
        x = (1 - f) * F.silu(x)
        h, o = torch.zeros(x.shape[0], x.shape[2], dtype=x.dtype), torch.zeros_like(x)
        for i in range(x.shape[1]):
            h = f[:, i] * h + x[:, i]
            o[:, i] = h
        return o, h

    return fn, [*s.several(2, s.d), s.new(s.d)]


def griffin(s: Sizes) -> Layer:
    def fn(x: Tensor, a: Tensor, gx: Tensor, ga: Tensor, pos: Tensor) -> Any:
        log_a = -8.0 * ga.sigmoid() * F.softplus(a)
        decay, reset = torch.exp(log_a), (pos == 0)[..., None]
        mult = torch.where(reset, 1.0, torch.sqrt((1 - torch.exp(2 * log_a)).clamp(min=1e-6)))
        x, decay = x * gx.sigmoid() * mult, decay * ~reset
        h, ys = torch.zeros(x.shape[0], x.shape[2], dtype=torch.float32 if x.dtype != torch.float64 else x.dtype), []
        for t in range(x.shape[1]):
            h = decay[:, t].to(h) * h + x[:, t].to(h)
            ys.append(h.to(x.dtype))
        return torch.stack(ys, 1), h

    pos = torch.arange(s.t).expand(s.b, -1) % max(s.t // 2, 1)
    return fn, [s.seq(s.d), s.new(s.d), *s.several(2, s.d), pos]


def s4d(s: Sizes) -> Layer:
    def fn(u: Tensor, log_dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
        dt, A = log_dt.exp()[:, None], -A.exp()
        dA, dB = torch.exp(dt * A), (torch.exp(dt * A) - 1) / A * B
        h, ys = u.new_zeros(u.shape[0], *A.shape), []
        for t in range(u.shape[1]):
            h = dA * h + dB * u[:, t, :, None]
            ys.append((C * h).sum(-1) + D * u[:, t])
        return torch.stack(ys, dim=1)

    return fn, [s.seq(s.d), s.new(s.d), *[s.new(s.d, s.k) for _ in range(3)], s.new(s.d)]


def s5(s: Sizes) -> Layer:
    def fn(u: Tensor, re: Tensor, im: Tensor, B: Tensor, C: Tensor) -> Tensor:
        lam = torch.complex(-re.exp(), im)
        x = torch.zeros(u.shape[0], lam.shape[0], dtype=lam.dtype)
        ys = []
        for t in range(u.shape[1]):
            x = torch.exp(lam * 0.1) * x + torch.complex(u[:, t] @ B, torch.zeros_like(u[:, t] @ B))
            ys.append((x @ torch.complex(C, C * 0.5)).real * 2)
        return torch.stack(ys, 1)

    return fn, [s.seq(s.d), s.new(s.k), s.new(s.k), s.new(s.d, s.k), s.new(s.k, s.d)]


def lru(s: Sizes) -> Layer:
    def fn(x: Tensor, nu: Tensor, theta: Tensor, gamma: Tensor) -> Tensor:
        mag, angle = torch.exp(-nu.exp()), theta.exp()
        re, im = mag * angle.cos(), mag * angle.sin()
        hr = hi = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            hr, hi = re * hr - im * hi + gamma * x[:, t], re * hi + im * hr
            out.append(hr + 0.1 * hi)
        return torch.stack(out, 1)

    return fn, [s.seq(s.d), s.new(s.d), s.new(s.d), s.new(s.d)]


def slstm(s: Sizes) -> Layer:
    def fn(z: Tensor, i: Tensor, f: Tensor, o: Tensor, R: Tensor) -> Tensor:
        c = n = h = m = torch.zeros_like(z[:, 0])
        out = []
        for t in range(z.shape[1]):
            rz, ri, rf, ro = (h @ R).chunk(4, -1)
            ft, it = F.logsigmoid(f[:, t] + rf), i[:, t] + ri
            new = torch.maximum(ft + m, it)
            fp, ip, m = torch.exp(ft + m - new), torch.exp(it - new), new
            c = fp * c + ip * torch.tanh(z[:, t] + rz)
            n = fp * n + ip
            h = torch.sigmoid(o[:, t] + ro) * c / n
            out.append(h)
        return torch.stack(out, 1)

    return fn, [*s.several(4, s.d), s.new(s.d, 4 * s.d, scale=0.2)]


def mlstm(s: Sizes) -> Layer:
    def fn(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Any:
        B, T, H, D = q.shape
        c, n, m = q.new_zeros(B, H, D, v.shape[-1]), q.new_zeros(B, H, D), q.new_zeros(B, H, 1)
        f, out = F.logsigmoid(f), []
        for t in range(T):
            m_new = torch.max(f[:, t, :, None] + m, i[:, t, :, None])
            fa, ia = (f[:, t, :, None] + m - m_new).exp(), (i[:, t, :, None] - m_new).exp()
            c = fa[..., None] * c + ia[..., None] * (k[:, t, :, :, None] * v[:, t, :, None, :])
            n, m = fa * n + ia * k[:, t], m_new
            num = torch.einsum("bhd,bhdv->bhv", q[:, t], c)
            den = torch.maximum((q[:, t] * n).sum(-1, keepdim=True).abs(), torch.exp(-m))
            out.append(num / (den + 1e-6))
        return torch.stack(out, dim=1), c

    return fn, [*s.several(2, s.h, s.k), s.seq(s.h, s.v), *s.several(2, s.h)]


def ttt_linear(s: Sizes) -> Layer:
    def fn(q: Tensor, k: Tensor, v: Tensor, eta: Tensor, W: Tensor) -> Tensor:
        W, out = W.expand(q.shape[0], -1, -1), []
        for t in range(q.shape[1]):
            error = torch.bmm(k[:, t : t + 1], W) - v[:, t : t + 1]
            W = W - eta[:, t].sigmoid()[:, None, None] * torch.bmm(k[:, t : t + 1].transpose(1, 2), error)
            out.append(torch.bmm(q[:, t : t + 1], W))
        return torch.cat(out, 1)

    return fn, [s.seq(s.k), s.seq(s.k, scale=0.3), s.seq(s.v), s.seq(), s.new(s.k, s.v)]


def delta_rule(s: Sizes) -> Layer:
    def fn(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Any:
        k, beta, g = F.normalize(k, dim=-1), beta.sigmoid(), -F.softplus(g)
        S, o = torch.zeros(*q.shape[:1], q.shape[2], q.shape[3], v.shape[3]).to(v), torch.zeros_like(v)
        for i in range(q.shape[1]):
            S = S.clone() * g[:, i].exp()[..., None, None]
            _v = v[:, i].clone() - (S * k[:, i][..., None]).sum(-2)
            S = S + k[:, i].unsqueeze(-1) * (_v * beta[:, i][..., None]).unsqueeze(-2)
            o[:, i] = torch.einsum("bhd,bhdm->bhm", q[:, i], S)
        return o, S

    return fn, [*s.several(2, s.h, s.k), s.seq(s.h, s.v), *s.several(2, s.h)]


def elman(s: Sizes) -> Layer:
    def fn(x: Tensor, W: Tensor, U: Tensor, b: Tensor) -> Any:
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.size(1)):
            h = torch.tanh(F.linear(x[:, t], W, b) + F.linear(h, U))
            out.append(h)
        return torch.stack(out).transpose(0, 1), h

    return fn, [s.seq(s.d), s.new(s.d, s.d), s.new(s.d, s.d, scale=0.3), s.new(s.d)]


def lstm_cell(s: Sizes) -> Layer:
    def fn(x: Tensor, W: Tensor, U: Tensor, b: Tensor) -> Any:
        h = c = x.new_zeros(x.shape[0], U.shape[0])
        out = []
        for xt in x.unbind(1):
            i, f, g, o = (xt @ W + h @ U + b).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            out.append(h)
        return torch.stack(out, 1), (h, c)

    return fn, [s.seq(s.d), s.new(s.d, 12), s.new(3, 12), s.new(12)]


def gru_cell(s: Sizes) -> Layer:
    def fn(x: Tensor, wi: Tensor, wh: Tensor) -> Tensor:
        h, out = x.new_zeros(x.shape[0], wh.shape[1]), x.new_empty(x.shape[0], x.shape[1], wh.shape[1])
        for t in range(x.shape[1]):
            h = torch.ops.aten.gru_cell(x[:, t], h, wi, wh)
            out[:, t] = h
        return out

    return fn, [s.seq(s.d), s.new(9, s.d), s.new(9, 3)]


def ind_rnn(s: Sizes) -> Layer:
    def fn(x: Tensor, u: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = F.relu(x[:, t] + u * h)
            out.append(h)
        return torch.stack(out, 1)

    return fn, [s.seq(s.d), s.new(s.d)]


def sru(s: Sizes) -> Layer:
    def fn(x: Tensor, W: Tensor, b: Tensor) -> Any:
        u, f, r = (x @ W).chunk(3, -1)
        f, r = (f + b).sigmoid(), (r + b).sigmoid()
        c, hs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            c = f[:, t] * c + (1 - f[:, t]) * u[:, t]
            hs.append(r[:, t] * torch.tanh(c) + (1 - r[:, t]) * x[:, t])
        return torch.stack(hs, 1), c

    return fn, [s.seq(s.d), s.new(s.d, 3 * s.d), s.new(s.d)]


def qrnn(s: Sizes) -> Layer:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = F.conv1d(F.pad(x.transpose(1, 2), (1, 0)), w).transpose(1, 2)
        z, f, o = y.chunk(3, -1)
        c, out = None, []
        for zt, ft, ot in zip(z.tanh().unbind(1), f.sigmoid().unbind(1), o.sigmoid().unbind(1), strict=True):
            c = (1 - ft) * zt if c is None else ft * c + (1 - ft) * zt
            out.append(ot * c)
        return torch.stack(out, 1)

    return fn, [s.seq(s.d), s.new(3 * s.d, s.d, 2)]


def kalman(s: Sizes) -> Layer:
    def fn(z: Tensor, A: Tensor, H: Tensor) -> Any:
        x, P = z.new_zeros(z.shape[0], 2, 1), torch.eye(2, dtype=z.dtype).expand(z.shape[0], 2, 2)
        Q, R, eye, out = 0.1 * torch.eye(2, dtype=z.dtype), torch.eye(1, dtype=z.dtype), torch.eye(2, dtype=z.dtype), []
        for t in range(z.shape[1]):
            x, P = A @ x, A @ P @ A.mT + Q
            S = H @ P @ H.mT + R
            K = P @ H.mT / S
            x = x + K @ (z[:, t, None, None] - H @ x)
            P = (eye - K @ H) @ P
            out.append(x[..., 0])
        return torch.stack(out, 1), P

    return fn, [s.seq(), s.new(2, 2, scale=0.4), s.new(1, 2)]


def ema_in_place(s: Sizes) -> Layer:
    def fn(x: Tensor) -> Any:
        m, v, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), torch.empty_like(x)
        for t in range(x.shape[1]):
            m.mul_(0.9).add_(x[:, t], alpha=0.1)
            v.mul_(0.99).addcmul_(x[:, t], x[:, t], value=0.01)
            out[:, t] = m / (v.sqrt() + 1e-3)
        return out, m

    return fn, [s.seq(s.d)]


def macd(s: Sizes) -> Layer:
    def fn(x: Tensor) -> Tensor:
        def ema(x: Tensor, span: int) -> Tensor:
            alpha, out = 2 / (span + 1), [x[..., 0]]
            for i in range(1, x.shape[-1]):
                out.append(alpha * x[..., i] + (1 - alpha) * out[-1])
            return torch.stack(out, -1)

        line = ema(x, 12) - ema(x, 26)
        return line - ema(line, 9)

    return fn, [s.new(s.b, s.t)]


def wilder_rsi(s: Sizes) -> Layer:
    def fn(x: Tensor) -> Tensor:
        change = x[:, 1:] - x[:, :-1]
        up, down = change.clamp(min=0), (-change).clamp(min=0)
        u = d = torch.zeros_like(x[:, 0])
        out = []
        for t in range(change.shape[1]):
            u, d = (u * 13 + up[:, t]) / 14, (d * 13 + down[:, t]) / 14
            out.append(100 - 100 / (1 + u / (d + 1e-3)))
        return torch.stack(out, 1)

    s.t = max(s.t, 2)
    return fn, [s.seq(s.d)]


def biquad(s: Sizes) -> Layer:
    def fn(x: Tensor, b: Tensor) -> Tensor:
        x1 = x2 = y1 = y2 = torch.zeros_like(x[..., 0])
        out = torch.zeros_like(x)
        for n in range(x.shape[-1]):
            y = b[0] * x[..., n] + b[1] * x1 + b[2] * x2 + 1.5 * y1 - 0.7 * y2
            out[..., n] = y
            x1, x2, y1, y2 = x[..., n], x1, y, y1
        return out

    return fn, [s.new(s.b, s.t), s.new(3)]


def crf_forward(s: Sizes) -> Layer:
    def fn(emissions: Tensor, transitions: Tensor, mask: Tensor) -> Tensor:
        score = emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            new = torch.logsumexp(score.unsqueeze(2) + transitions + emissions[:, t].unsqueeze(1), dim=1)
            score = torch.where(mask[:, t].unsqueeze(1), new, score)
        return torch.logsumexp(score, dim=1)

    return fn, [s.seq(s.k), s.new(s.k, s.k), s.mask()]


def viterbi(s: Sizes) -> Layer:
    def fn(emissions: Tensor, transitions: Tensor) -> Any:
        score, back = emissions[:, 0], []
        for t in range(1, emissions.shape[1]):
            score, at = (score.unsqueeze(2) + transitions).max(1)
            score = score + emissions[:, t]
            back.append(at)
        best, last = score.max(1)
        path = [last]
        for at in reversed(back):
            last = at.gather(1, last[:, None])[:, 0]
            path.append(last)
        return best, torch.stack(path[::-1], 1)

    return fn, [s.seq(s.k), s.new(s.k, s.k)]


def dtw(s: Sizes) -> Layer:
    s.t = min(s.t, 6)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        d = (x[:, :, None] - y[:, None]).square().sum(-1)
        inf = torch.full_like(d[:, 0, 0], torch.inf)
        row = [torch.zeros_like(inf), *[inf] * d.shape[2]]
        for i in range(d.shape[1]):
            new = [inf]
            for j in range(d.shape[2]):
                new.append(d[:, i, j] + torch.minimum(torch.minimum(row[j], row[j + 1]), new[j]))
            row = new
        return row[-1]

    return fn, [s.seq(s.k), s.seq(s.k)]


def segment_sums(s: Sizes) -> Layer:
    def fn(x: Tensor) -> Tensor:
        out = segsum(-F.softplus(x.transpose(1, 2))).exp()
        return torch.einsum("bhts,bsh->bth", out, x)

    return fn, [s.seq(s.h)]


def beam(s: Sizes) -> Layer:
    def fn(logits: Tensor) -> Any:
        scores, which = logits[:, 0].topk(2, -1)
        paths = which.unsqueeze(-1)
        for t in range(1, logits.shape[1]):
            total = (scores.unsqueeze(-1) + F.log_softmax(logits[:, t], -1).unsqueeze(1)).flatten(1)
            scores, at = total.topk(2, -1)
            parent, token = at // logits.shape[-1], at % logits.shape[-1]
            paths = torch.cat([paths.gather(1, parent.unsqueeze(-1).expand_as(paths)), token.unsqueeze(-1)], -1)
        return scores, paths

    return fn, [s.seq(5)]


def gae(s: Sizes) -> Layer:
    def fn(reward: Tensor, value: Tensor, done: Tensor) -> Any:
        advantage, last = torch.zeros_like(reward), 0
        for t in reversed(range(reward.shape[1])):
            follow = value[:, t + 1] if t + 1 < reward.shape[1] else torch.zeros_like(value[:, 0])
            keep = 1.0 - done[:, t].to(reward.dtype)
            delta = reward[:, t] + 0.99 * follow * keep - value[:, t]
            advantage[:, t] = last = delta + 0.99 * 0.95 * keep * last
        return advantage, advantage + value

    return fn, [s.seq(), s.seq(), s.mask(share=0.2)]


def vtrace(s: Sizes) -> Layer:
    def fn(rho: Tensor, reward: Tensor, value: Tensor) -> Tensor:
        rho, vs = rho.exp().clamp(max=1), []
        follow = torch.cat([value[:, 1:], value[:, -1:]], 1)
        deltas, acc = rho * (reward + 0.9 * follow - value), torch.zeros_like(value[:, 0])
        for t in range(reward.shape[1] - 1, -1, -1):
            acc = deltas[:, t] + 0.9 * rho[:, t] * acc
            vs.insert(0, acc + value[:, t])
        return torch.stack(vs, 1)

    return fn, [s.seq(), s.seq(), s.seq()]


def spikes(s: Sizes) -> Layer:
    def fn(x: Tensor) -> Any:
        u, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            u = 0.9 * u + x[:, t]
            fired = (u > 1.0).to(x.dtype)
            u = u - fired.detach()
            out.append(fired + u.sigmoid() - u.sigmoid().detach())
        return torch.stack(out, 1)

    return fn, [s.seq(s.d)]


def cumsum_attention(s: Sizes) -> Layer:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bthk,bthv->bthkv", k, v).cumsum(1)
        z = 1 / (torch.einsum("bthk,bthk->bth", q, k.cumsum(1)) + 1e-3)
        return torch.einsum("bthk,bthkv,bth->bthv", q, kv, z)

    return fn, [*s.several(2, s.h, s.k), s.seq(s.h, s.v)]


def normalised_attention(s: Sizes) -> Layer:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.relu() + 0.1, k.relu() + 0.1
        S, z, out = torch.zeros_like(k[:, 0].unsqueeze(-1) * v[:, 0].unsqueeze(-2)), torch.zeros_like(k[:, 0]), []
        for t in range(q.shape[1]):
            S = S + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            z = z + k[:, t]
            out.append((q[:, t].unsqueeze(-2) @ S).squeeze(-2) / (q[:, t] * z).sum(-1, keepdim=True))
        return torch.stack(out, 1)

    return fn, [*s.several(2, s.h, s.k), s.seq(s.h, s.v)]


def holt_winters(s: Sizes) -> Layer:
    def fn(x: Tensor, p: Tensor) -> Tensor:
        alpha, beta, gamma = p.sigmoid().unbind()
        level, trend, season, out = x[:, 0], torch.zeros_like(x[:, 0]), [torch.zeros_like(x[:, 0])] * 4, []
        for t in range(x.shape[1]):
            old, at = level, season[t % 4]
            level = alpha * (x[:, t] - at) + (1 - alpha) * (level + trend)
            trend = beta * (level - old) + (1 - beta) * trend
            season[t % 4] = gamma * (x[:, t] - level) + (1 - gamma) * at
            out.append(level + trend + at)
        return torch.stack(out, 1)

    return fn, [s.seq(s.d), s.new(3)]


def pcen(s: Sizes) -> Layer:
    def fn(x: Tensor, smooth: Tensor) -> Tensor:
        x, c = x.abs() + 0.1, smooth.sigmoid()
        m, ms = x[:, 0], []
        for t in range(x.shape[1]):
            m = (1 - c) * m + c * x[:, t]
            ms.append(m)
        M = torch.stack(ms, 1)
        return (x / (1e-2 + M) ** 0.98 + 2.0) ** 0.5 - 2.0**0.5

    return fn, [s.seq(s.d), s.new(s.d)]


def mega_ema(s: Sizes) -> Layer:
    def fn(x: Tensor, delta: Tensor, alpha: Tensor, beta: Tensor, eta: Tensor) -> Tensor:
        a, d = alpha.sigmoid(), delta.sigmoid()
        h, out = torch.zeros(x.shape[0], *a.shape, dtype=x.dtype), []
        for t in range(x.shape[1]):
            h = a * beta * x[:, t].unsqueeze(-1) + (1 - a * d) * h
            out.append(torch.einsum("bdn,dn->bd", h, eta))
        return F.silu(torch.stack(out, 1) + x)

    return fn, [s.seq(s.d), *[s.new(s.d, s.k) for _ in range(4)]]


def hmm_scaled(s: Sizes) -> Layer:
    def fn(obs: Tensor, A: Tensor) -> Any:
        A, e = A.softmax(-1), obs.softmax(-1)
        alpha, ll = e[:, 0] / e.shape[-1], 0
        for t in range(1, obs.shape[1]):
            c = alpha.sum(-1, keepdim=True)
            ll = ll + c.log()
            alpha = (alpha / c) @ A * e[:, t]
        return ll + alpha.sum(-1, keepdim=True).log(), alpha

    return fn, [s.seq(s.k), s.new(s.k, s.k)]


def oscillator(s: Sizes) -> Layer:
    def fn(f: Tensor, k: Tensor) -> Tensor:
        x, v, xs = torch.zeros_like(f[:, 0]), torch.zeros_like(f[:, 0]), []
        for t in range(f.shape[1]):
            v = v + 0.1 * (f[:, t] - k.exp() * x - 0.2 * v)
            x = x + 0.1 * v
            xs.append(x)
        return torch.stack(xs, 1)

    return fn, [s.seq(s.d), s.new(s.d)]


def cascade(s: Sizes) -> Layer:
    def fn(x: Tensor, a: Tensor) -> Tensor:
        states = [torch.zeros_like(x[:, 0]) for _ in range(3)]
        out = []
        for t in range(x.shape[1]):
            y = x[:, t]
            for i in range(3):
                states[i] = y = torch.lerp(states[i], y, a[i].sigmoid())
            out.append(y)
        return torch.stack(out, 1)

    return fn, [s.seq(s.d), s.new(3)]


def both_ways(s: Sizes) -> Layer:
    def fn(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        def run(x: Tensor, a: Tensor) -> Tensor:
            h, out = torch.zeros_like(x[:, 0]), []
            for t in range(x.shape[1]):
                h = a.sigmoid() * h + x[:, t]
                out.append(h)
            return torch.stack(out, 1)

        return torch.cat([run(x, a), run(x.flip(1), b).flip(1)], -1)

    return fn, [s.seq(s.d), s.new(s.d), s.new(s.d)]


def two_layers(s: Sizes) -> Layer:
    def fn(x: Tensor, W: Tensor, a: Tensor) -> Tensor:
        for layer in range(2):
            h, out = torch.zeros_like(x[:, 0]), []
            for t in range(x.shape[1]):
                h = a[layer].sigmoid() * h + (1 - a[layer].sigmoid()) * x[:, t]
                out.append(h)
            x = x + F.gelu(torch.stack(out, 1) @ W[layer])
        return x

    return fn, [s.seq(s.d), s.new(2, s.d, s.d), s.new(2, s.d)]


def padded(s: Sizes) -> Layer:
    def fn(x: Tensor, g: Tensor, lengths: Tensor) -> Any:
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            new = g[:, t].sigmoid() * h + x[:, t]
            h = torch.where((t < lengths)[:, None], new, h)
            out.append(h.masked_fill((t >= lengths)[:, None], 0.0))
        return torch.stack(out, 1), h

    lengths = torch.randint(0, s.t + 1, (s.b,), generator=s.generator)
    return fn, [*s.several(2, s.d), lengths]


def embedded(s: Sizes) -> Layer:
    def fn(tokens: Tensor, table: Tensor, decay: Tensor) -> Tensor:
        x, h, out = table[tokens], None, []
        for t in range(tokens.shape[1]):
            h = x[:, t] if h is None else torch.where(tokens[:, t, None] == 0, x[:, t], decay.sigmoid() * h + x[:, t])
            out.append(h)
        return torch.stack(out, 1)

    return fn, [torch.randint(0, 5, (s.b, s.t), generator=s.generator), s.new(5, s.d), s.new(s.d)]


def hillis_steele(s: Sizes) -> Layer:
    def fn(a: Tensor, x: Tensor) -> Tensor:
        a, k = a.sigmoid(), 1
        while k < x.shape[1]:
            x = x + a * F.pad(x, (0, 0, k, 0))[:, :-k]
            a = a * F.pad(a, (0, 0, k, 0), value=1.0)[:, :-k]
            k *= 2
        return x

    return fn, s.several(2, s.d)


def cumprod_scan(s: Sizes) -> Layer:
    def fn(a: Tensor, x: Tensor) -> Tensor:
        p = (0.8 + 0.2 * a.sigmoid()).cumprod(1)
        return p * (x / p).cumsum(1)

    return fn, s.several(2, s.d)


def online_softmax(s: Sizes) -> Layer:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Any:
        m, l = torch.full_like(q[:, 0, :, 0], -torch.inf), torch.zeros_like(q[:, 0, :, 0])
        acc = torch.zeros_like(v[:, 0])
        for t in range(k.shape[1]):
            score = (q[:, -1] * k[:, t]).sum(-1)
            new = torch.maximum(m, score)
            scale, p = torch.exp(m - new), torch.exp(score - new)
            l, acc, m = l * scale + p, acc * scale[..., None] + p[..., None] * v[:, t], new
        return acc / l[..., None], m + l.log()

    return fn, [*s.several(2, s.h, s.k), s.seq(s.h, s.v)]


def garch(s: Sizes) -> Layer:
    def fn(r: Tensor, p: Tensor) -> Tensor:
        w, a, b = p.exp().unbind()
        var, out = torch.ones_like(r[:, 0]), []
        for t in range(r.shape[1]):
            out.append(var)
            var = w + 0.1 * a.sigmoid() * r[:, t] ** 2 + 0.8 * b.sigmoid() * var
        v = torch.stack(out, 1)
        return 0.5 * (v.log() + r**2 / v).sum(1)

    return fn, [s.seq(), s.new(3)]


def adam(s: Sizes) -> Layer:
    def fn(grads: Tensor) -> Tensor:
        m = v = p = torch.zeros_like(grads[:, 0])
        for t in range(grads.shape[1]):
            g = grads[:, t]
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
            mhat, vhat = m / (1 - 0.9 ** (t + 1)), v / (1 - 0.99 ** (t + 1))
            p = p - 0.1 * mhat / (vhat.sqrt() + 1e-2)
        return p

    return fn, [s.seq(s.d)]


def fast_weights(s: Sizes) -> Layer:
    def fn(x: Tensor, W: Tensor) -> Tensor:
        A, h, out = x.new_zeros(x.shape[0], x.shape[2], x.shape[2]), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            A = 0.9 * A + 0.1 * h.unsqueeze(2) * h.unsqueeze(1)
            h = torch.tanh(x[:, t] @ W + (A @ h.unsqueeze(2)).squeeze(2))
            out.append(h)
        return torch.stack(out, 1)

    return fn, [s.seq(s.d), s.new(s.d, s.d, scale=0.3)]


def simple_chunked_attention(s: Sizes) -> Layer:
    s.t = max(s.t // 4, 1) * 4

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        q, k, v, g = (x.unflatten(1, (-1, 4)) for x in (q, k, v, F.logsigmoid(g)))
        g = g.cumsum(2)
        S, out = torch.zeros_like(k[:, 0, 0].unsqueeze(-1) * v[:, 0, 0].unsqueeze(-2)), []
        mask = torch.ones(4, 4, dtype=torch.bool).tril()[None, :, :, None]
        for c in range(q.shape[1]):
            qc, kc, vc, gc = q[:, c], k[:, c], v[:, c], g[:, c]
            inter = torch.einsum("blhk,bhkv->blhv", qc * gc.exp().unsqueeze(-1), S)
            decay = (gc[:, :, None] - gc[:, None]).masked_fill(~mask, -torch.inf).exp()
            intra = torch.einsum("blhk,bmhk,blmh,bmhv->blhv", qc, kc, decay, vc)
            out.append(inter + intra)
            last = gc[:, -1]
            S = S * last.exp()[..., None, None] + torch.einsum(
                "blhk,blhv->bhkv", kc * (last[:, None] - gc).exp().unsqueeze(-1), vc
            )
        return torch.stack(out, 1).flatten(1, 2)

    return fn, [*s.several(2, s.h, s.k), s.seq(s.h, s.v), s.seq(s.h)]


def rolled_convolution(s: Sizes) -> Layer:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        state, out = x.new_zeros(x.shape[0], x.shape[2], w.shape[1]), []
        for t in range(x.shape[1]):
            state = torch.cat([state[:, :, 1:], x[:, t, :, None]], -1)
            out.append(F.silu((state * w).sum(-1) + b))
        return torch.stack(out, 1)

    return fn, [s.seq(s.d), s.new(s.d, 4), s.new(s.d)]


def causal_convolution(s: Sizes) -> Layer:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = F.conv1d(x.transpose(1, 2), w.unsqueeze(1), b, padding=w.shape[1] - 1, groups=w.shape[0])
        return F.silu(y[..., : x.shape[1]]).transpose(1, 2)

    return fn, [s.seq(s.d), s.new(s.d, 4), s.new(s.d)]


def discounted(s: Sizes) -> Layer:
    def fn(reward: Tensor, done: Tensor) -> Any:
        running, out = 0, []
        for t in range(reward.shape[1])[::-1]:
            running = reward[:, t] + 0.97 * running * (~done[:, t])
            out.append(running)
        return torch.stack(out[::-1], 1)

    return fn, [s.seq(), s.mask(share=0.2)]


def eligibility(s: Sizes) -> Layer:
    def fn(x: Tensor, r: Tensor) -> Any:
        z, w = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
        for t in range(x.shape[1] - 1):
            z = 0.9 * 0.8 * z + x[:, t]
            w = w + 0.05 * r[:, t, None] * z
        return w, z

    return fn, [s.seq(s.d), s.seq()]


def counted(s: Sizes) -> Layer:
    def fn(x: Tensor, hits: Tensor) -> Any:
        count, total, out = torch.zeros(x.shape[0], dtype=torch.int64), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            count = count + hits[:, t]
            total = total + x[:, t] * hits[:, t, None]
            out.append(total / count.clamp(min=1)[:, None])
        return torch.stack(out, 1), count

    return fn, [s.seq(s.d), s.mask()]


def layer_normed(s: Sizes) -> Layer:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = 0.9 * h + F.layer_norm(x[:, t], (x.shape[-1],), w)
            out.append(F.layer_norm(h, (x.shape[-1],)))
        return torch.stack(out, 1)

    return fn, [s.seq(s.d), s.new(s.d)]


def dilated(s: Sizes) -> Layer:
    def fn(x: Tensor, a: Tensor) -> Tensor:
        hs: list[Tensor] = []
        for t in range(x.shape[1]):
            hs.append(a.sigmoid() * hs[t - 4] + x[:, t] if t >= 4 else x[:, t])
        return torch.stack(hs, 1)

    return fn, [s.seq(s.d), s.new(s.d)]


def writes_its_input(s: Sizes) -> Layer:
    def fn(x: Tensor, a: Tensor) -> Tensor:
        x = x.clone()
        for t in range(1, x.shape[1]):
            x[:, t] += a.sigmoid() * x[:, t - 1]
        return x

    return fn, [s.seq(s.d), s.new(s.d)]


def polynomial(s: Sizes) -> Layer:
    def fn(x: Tensor, c: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for i in range(c.shape[0]):
            y = y * x + c[i]
        return y

    return fn, [s.seq(s.d, scale=0.5), s.new(20)]


def log_space_scan(s: Sizes) -> Layer:
    def fn(f: Tensor, i: Tensor) -> Tensor:
        f, m, out = F.logsigmoid(f), torch.full_like(i[:, 0], -torch.inf), []
        for t in range(f.shape[1]):
            m = torch.logaddexp(m + f[:, t], i[:, t])
            out.append(m)
        return torch.stack(out, 1).exp()

    return fn, s.several(2, s.d)


def running_max(s: Sizes) -> Layer:
    def fn(x: Tensor) -> Any:
        m, out = x[:, 0], []
        for t in range(x.shape[1]):
            m = torch.maximum(m - 0.1, x[:, t])
            out.append(m)
        return torch.stack(out, 1)

    return fn, [s.seq(s.d)]


LAYERS: dict[str, Callable[[Sizes], Layer]] = {
    one.__name__: one
    for one in (
        min_gru_tokens, min_gru_log, min_lstm, rwkv4_plain, rwkv4_stable, rwkv5, rwkv6, rwkv7, mamba1,
        mamba1_slow_forward, mamba2_steps, mamba2_chunks, gla, retention, retention_parallel, hgrn, griffin, s4d, s5,
        lru, slstm, mlstm, ttt_linear, delta_rule, elman, lstm_cell, gru_cell, ind_rnn, sru, qrnn, kalman,
        ema_in_place, macd, wilder_rsi, biquad, crf_forward, viterbi, dtw, segment_sums, beam, gae, vtrace, spikes,
        cumsum_attention, normalised_attention, holt_winters, pcen, mega_ema, hmm_scaled, oscillator, cascade,
        both_ways, two_layers, padded, embedded, hillis_steele, cumprod_scan, online_softmax, garch, adam,
        fast_weights, simple_chunked_attention, rolled_convolution, causal_convolution, discounted, eligibility,
        counted, layer_normed, dilated, writes_its_input, polynomial, log_space_scan, running_max,
    )
}  # fmt: skip
