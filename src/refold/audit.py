"""Are the scan packages on this machine right? Their functions against refold's own in float64, on this device.

Kernels that are right on one GPU and version of Triton have been wrong on the next, often by finite and plausible
numbers. Each case calls a function of an installed package as its users do, and the function of the same name in
`refold.compat`, in float64 on the CPU, with the same arguments.

Errors are taken over blocks of tokens, so that a mistake in a few tokens is not hidden by the size of the others. The
bound is eight roundings of the arithmetic that such kernels use: bfloat16 for bfloat16, TensorFloat-32 for float32.

The delta rule and its relatives are compared with the definition, and so are refold's own functions that take the
place of fla's.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from refold.compat import PACKAGES
from refold.compat import causal_conv1d as conv
from refold.compat import mamba_ssm as mamba
from refold.errors import first_line
from refold.ops.delta_rule.reference import delta_rule

ROUNDING = {torch.float32: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ALLOWED = 8  # roundings
BLOCK = 64  # tokens

Compared = Iterator[tuple[str, Tensor, Tensor]]
"""What is compared, the package's result, and that in float64; tokens on axis 1."""


@dataclass(frozen=True)
class CallForm:
    """One way to call one function."""

    package: str
    module: str
    function: str
    name: str
    run: Callable[[Callable[..., Any], torch.device, torch.dtype], Compared]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    gib: int = 0
    """Free memory of a GPU that it needs; 0 runs anywhere."""


@dataclass(frozen=True)
class Finding:
    """What came of a case."""

    package: str
    function: str
    case: str
    verdict: str
    """``"right"``, ``"wrong"`` or ``"not run"``."""
    detail: str

    def __str__(self) -> str:
        """Return one line."""
        what = ", ".join(filter(None, (f"{self.package} {self.function}".strip(), self.case)))
        return f"{self.verdict:8} {what}: {self.detail}"


def audit(device: str | None = None) -> Iterator[Finding]:
    """Run every case of every package that can be imported, and yield what came of it.

    Args:
        device: Where to run; None is the GPU if there is one, else the CPU.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for package in dict.fromkeys(case.package for case in CASES):
        if importlib.util.find_spec(package) is None:
            yield Finding(package, "", "all cases", "not run", "the package is not installed")
            continue
        for case in CASES:
            if case.package == package:
                yield from _run(case, where)


def _run(case: CallForm, device: torch.device) -> Iterator[Finding]:
    try:
        function = getattr(importlib.import_module(case.module), case.function)
    except Exception as error:  # whatever another package raises on import is a reason
        yield _not_run(case, f"{case.module} cannot be imported: {first_line(error)}")
        return
    for dtype in case.dtypes:
        yield _judge(case, function, device, dtype)


def _judge(case: CallForm, function: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Finding:
    if case.gib:
        if device.type != "cuda":
            return _not_run(case, f"needs a GPU with {case.gib} GiB free", dtype)
        free = torch.cuda.mem_get_info(device)[0] / 2**30
        if free < case.gib:
            return _not_run(case, f"needs a GPU with {case.gib} GiB free; {free:.0f} are", dtype)
    torch.manual_seed(0)
    worst, where = 0.0, ""
    try:
        for what, theirs, exact in case.run(function, device, dtype):
            error = error_of(theirs, exact)
            if not error <= worst:  # NaN counts
                worst, where = error, what
    except Exception as error:
        return _not_run(case, f"raised {first_line(error)}", dtype)
    allowed = ALLOWED * ROUNDING[dtype]
    verdict = "right" if worst <= allowed else "wrong"
    name = f"{case.name}, {str(dtype).removeprefix('torch.')}"
    return Finding(
        case.package, case.function, name, verdict, f"error {worst:.1e} of {allowed:.1e} allowed, in {where}"
    )


def error_of(theirs: Tensor, exact: Tensor) -> float:
    """Return the largest error of a block of tokens over its size (or a hundredth of what blocks have on average)."""
    if theirs.shape != exact.shape:
        return float("inf")
    exact = exact.detach()
    squares = torch.stack([(theirs.detach().double().cpu() - exact).square(), exact.square()])
    if squares.ndim < 3:
        squares = squares[:, None]
    blocks = torch.stack([piece.flatten(2).sum(-1) for piece in squares.split(BLOCK, 2)], -1)  # (2, b, c)
    errors, sizes = blocks.sqrt()
    return float((errors / sizes.maximum(0.01 * sizes.mean()).clamp(min=torch.finfo(torch.float64).tiny)).max())


def _not_run(case: CallForm, reason: str, dtype: torch.dtype | None = None) -> Finding:
    name = case.name if dtype is None else f"{case.name}, {str(dtype).removeprefix('torch.')}"
    return Finding(case.package, case.function, name, "not run", reason)


def _compare(
    theirs: Callable[..., Any], ours: Callable[..., Any], given: dict[str, Any], grads: bool = False
) -> Compared:
    """Call both with the same arguments; with ``grads``, compare the gradients of all floating-point ones, too."""
    leaves = {k: v for k, v in given.items() if isinstance(v, Tensor) and v.is_floating_point()}
    if grads:
        for leaf in leaves.values():
            leaf.requires_grad_()
    exact = {k: v.detach().double().cpu().requires_grad_(grads) for k, v in leaves.items()}
    rest = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in given.items() if k not in leaves}
    found, expected = theirs(**given), ours(**(rest | exact))
    found, expected = (v if isinstance(v, tuple) else (v,) for v in (found, expected))
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        yield f"result {i}", a, b
    if grads:
        cotangent = torch.randn(expected[0].shape, dtype=torch.float64)
        got = torch.autograd.grad(found[0], list(leaves.values()), cotangent.to(found[0]))
        want = torch.autograd.grad(expected[0], list(exact.values()), cotangent)
        for name, a, b in zip(leaves, got, want, strict=True):
            yield f"gradient of {name}", a, b


def _exact(given: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double().cpu() if isinstance(v, Tensor) else v for k, v in given.items()}


def _ssd_arguments(
    device: torch.device, dtype: torch.dtype, seqlen: int = 700, strided: bool = False
) -> dict[str, Any]:
    """Arguments of the Mamba-2 scan; ``strided`` ones are views of one wide projection, as in a layer."""
    h, p, g, n = 8, 64, 2, 64
    sizes = {"x": (h, p), "B": (g, n), "C": (g, n), "dt": (h,)}
    wide = torch.randn(1, seqlen, sum(_count(s) for s in sizes.values()), device=device, dtype=dtype)
    parts = wide.split([_count(s) for s in sizes.values()], -1)
    given: dict[str, Any] = {k: v.unflatten(-1, s) for (k, s), v in zip(sizes.items(), parts, strict=True)}
    if not strided:
        given = {k: v.contiguous() for k, v in given.items()}
    given = {k: v.detach() for k, v in given.items()}
    A = -torch.rand(h, device=device) * 4 - 0.5
    bias = torch.rand(h, device=device) * 2 - 4
    return given | {"A": A, "dt_bias": bias, "D": torch.randn(h, device=device), "chunk_size": 256, "dt_softplus": True}


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _documents(tokens: int, device: torch.device) -> Tensor:
    """Return the document of each token of a pack; the second one has one token."""
    return torch.bucketize(torch.arange(tokens, device=device), torch.tensor([99, 100, 363], device=device)).int()


def _ssd(strided: bool = False, grads: bool = False, pack: bool = False) -> Callable[..., Compared]:
    def run(theirs: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Compared:
        given = _ssd_arguments(device, dtype, strided=strided)
        if pack:
            given["seq_idx"] = _documents(700, device)[None]
        return _compare(theirs, mamba.mamba_chunk_scan_combined, given | {"return_final_states": not grads}, grads)

    return run


def _ssd_long(theirs: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Compared:
    """Read views of a projection of more than 2^31 elements; states forget tokens that are 768 or more back."""
    seqlen, width, seen = 140_000, 16_384, 1024
    given = _ssd_arguments(device, dtype, 8)
    wide = torch.empty(1, seqlen, width, device=device, dtype=dtype)
    start, tails = 0, {}
    for name in ("x", "B", "C", "dt"):
        shape = given[name].shape[2:]
        start += _count(shape)
        view = wide[..., width - start : width - start + _count(shape)]
        view.normal_()
        given[name] = view.unflatten(-1, shape)
        tails[name] = given[name][:, -seen:].clone()
    given["dt_bias"] = torch.zeros_like(given["dt_bias"])
    out = theirs(**given)
    expected = mamba.mamba_chunk_scan_combined(**_exact(given | tails))
    yield "the last 256 tokens", out[:, -256:], expected[:, -256:]


def _scan_arguments(
    device: torch.device, dtype: torch.dtype, b: int, d: int, n: int, t: int, least: float
) -> dict[str, Any]:
    """Arguments of the Mamba-1 scan; rates are at least ``least``."""
    u, delta, B, C = (torch.randn(b, s, t, device=device, dtype=dtype) for s in (d, d, n, n))
    A = -torch.rand(d, n, device=device) - least
    return {"u": u, "delta": delta, "A": A, "B": B, "C": C, "delta_softplus": True}


def _selective_scan(grads: bool = False) -> Callable[..., Compared]:
    def run(theirs: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Compared:
        given = _scan_arguments(device, dtype, 2, d := 96, 16, 700, 0.1)
        z, D, bias = torch.randn_like(given["u"]), torch.randn(d, device=device), torch.rand(d, device=device) - 3
        given |= {"z": z, "D": D, "delta_bias": bias}
        return _time_second(_compare(theirs, mamba.selective_scan_fn, given, grads))

    return run


def _selective_scan_long(theirs: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Compared:
    given, seen = _scan_arguments(device, dtype, 70, 1024, 4, 30_720, 4), 64
    out = theirs(**given)[-1:, -32:, -16:]
    exact = {k: v[-1:, ..., -seen:].double().cpu() for k, v in given.items() if k in ("u", "delta", "B", "C")}
    exact |= {k: exact[k][:, -32:] for k in ("u", "delta")}
    expected = mamba.selective_scan_fn(**exact, A=given["A"][-32:].double().cpu(), delta_softplus=True)
    yield "the last row", out.mT, expected[..., -16:].mT


def _time_second(compared: Compared) -> Compared:
    """Put the last axis of arrays (b, d, t) second."""
    for what, a, b in compared:
        swap = a.ndim == 3 and a.shape == b.shape
        yield what, a.mT if swap else a, b.mT if swap else b


def _state_update(slots: int) -> Callable[..., Compared]:
    def run(theirs: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Compared:
        b, h, p, g, n = 4, 8, 64, 2, 128
        state = torch.zeros(slots, h, p, n, device=device, dtype=dtype)
        index = torch.tensor([slots - 1, 0, slots // 2, slots - 2], device=device, dtype=torch.int32)
        rows = torch.randn(b, h, p, n, device=device, dtype=dtype)
        state[index.long()] = rows
        A, bias, D = -torch.rand(h, device=device), torch.rand(h, device=device), torch.randn(h, device=device)
        wide = torch.randn(b, h * p + 2 * g * n + h, device=device, dtype=dtype)
        x, B, C, dt = wide.split([h * p, g * n, g * n, h], -1)
        given = {
            "x": x.unflatten(-1, (h, p)), "dt": dt[..., None].expand(-1, -1, p), "A": A[:, None, None].expand(-1, p, n),
            "B": B.unflatten(-1, (g, n)), "C": C.unflatten(-1, (g, n)), "D": D[:, None].expand(-1, p),
            "dt_bias": bias[:, None].expand(-1, p), "dt_softplus": True,
        }  # fmt: skip
        out = theirs(state=state, **given, state_batch_indices=index)
        after = rows.double().cpu()
        expected = mamba.selective_state_update(after, **_exact(given))
        yield "the result", out, expected
        yield "the state", state[index.long()], after

    return run


def _norm(rows: int) -> Callable[..., Compared]:
    def run(theirs: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Compared:
        d = 1024
        x, z = (torch.randn(1, rows, d, device=device, dtype=dtype) for _ in range(2))
        weight = torch.randn(d, device=device)
        rest: dict[str, Any] = {"bias": None, "eps": 1e-5, "group_size": d // 4, "norm_before_gate": False}
        out = theirs(x=x, weight=weight, z=z, **rest)[:, -512:]
        x, z = (v[:, -512:].double().cpu() for v in (x, z))
        yield "the last rows", out, mamba.rmsnorm_fn(x=x, weight=weight.double().cpu(), z=z, **rest)

    return run


def _convolution(grads: bool = False, pack: bool = False, channels_last: bool = True) -> Callable[..., Compared]:
    def run(theirs: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Compared:
        d, t = 128, 700
        x = torch.randn(2, t, d + 64, device=device, dtype=dtype)[..., :d].mT
        x = x if channels_last else x.contiguous()
        weight, bias = torch.randn(d, 4, device=device, dtype=dtype), torch.randn(d, device=device, dtype=dtype)
        given: dict[str, Any] = {"x": x.detach(), "weight": weight, "bias": bias, "activation": "silu"}
        if pack:
            given["seq_idx"] = _documents(t, device).expand(2, -1).contiguous()
        return _time_second(_compare(theirs, conv.causal_conv1d_fn, given, grads))

    return run


def _convolution_long(theirs: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Compared:
    seqlen, width, d = 140_000, 16_384, 128
    wide = torch.empty(1, seqlen, width, device=device, dtype=dtype)
    x = wide[..., -d:].normal_().mT
    weight = torch.randn(d, 4, device=device, dtype=dtype)
    out = theirs(x=x, weight=weight, activation="silu")[..., -256:]
    expected = conv.causal_conv1d_fn(x[..., -300:].double().cpu(), weight.double().cpu(), activation="silu")
    yield "the last 256 tokens", out.mT, expected[..., -256:].mT


def _convolution_step(theirs: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Compared:
    d = 128
    x, state = (torch.randn(*s, device=device, dtype=dtype) for s in ((3, d), (3, d, 4)))
    weight = torch.randn(d, 4, device=device, dtype=dtype)
    exact = state.double().cpu()
    out = theirs(x=x, conv_state=state, weight=weight, activation="silu")
    expected = conv.causal_conv1d_update(x.double().cpu(), exact, weight.double().cpu(), activation="silu")
    yield "the result", out, expected
    yield "the state", state, exact


def linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, scale: float, g: Tensor | None = None, beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute the delta rule by its definition; without ``beta``, nothing is erased."""
    return delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens, scale=scale, erase=beta is not None)[0]


def _attention(decay: str, erases: bool, grads: bool = False, pack: bool = False) -> Callable[..., Compared]:
    """Compare linear attention with a decay per "head" or "key", or without one."""

    def run(theirs: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Compared:
        t, h, d = 300, 2, 64
        q, k, v = (torch.randn(1, t, h, d, device=device, dtype=dtype) for _ in range(3))
        k = (k / k.norm(dim=-1, keepdim=True)).to(dtype)
        given: dict[str, Any] = {"q": q, "k": k, "v": v, "scale": 0.125}
        if decay:
            given["g"] = -torch.rand(1, t, h, *([d] if decay == "key" else []), device=device) - 0.01
        if erases:
            given["beta"] = torch.rand(1, t, h, device=device, dtype=dtype)
        if pack:
            given["cu_seqlens"] = torch.tensor([0, 99, 100, 300], device=device)
        return _compare(lambda **keywords: theirs(**keywords)[0], linear_recurrence, given, grads)

    return run


_ATTENTION = {
    "chunk_simple_gla": ("fla.ops.simple_gla", "head", False),
    "chunk_gla": ("fla.ops.gla", "key", False),
    "chunk_delta_rule": ("fla.ops.delta_rule", "", True),
    "chunk_gated_delta_rule": ("fla.ops.gated_delta_rule", "head", True),
    "fused_recurrent_gated_delta_rule": ("fla.ops.gated_delta_rule", "head", True),
    "chunk_kda": ("fla.ops.kda", "key", True),
    "fused_recurrent_kda": ("fla.ops.kda", "key", True),
}
"""Functions of fla, and of `refold.compat.fla`: module of fla, decay, and whether they erase."""


def _cases() -> Iterator[CallForm]:
    ssd = ("mamba_ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    yield CallForm(*ssd, "contiguous", _ssd())
    yield CallForm(*ssd, "strided views", _ssd(strided=True))
    yield CallForm(*ssd, "pack", _ssd(pack=True))
    yield CallForm(*ssd, "gradients", _ssd(grads=True))
    yield CallForm(*ssd, "gradients of a pack of strided views", _ssd(True, True, True))
    yield CallForm(*ssd, "views past 2^31 elements", _ssd_long, (torch.bfloat16,), gib=12)
    scan = ("mamba_ssm", "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
    yield CallForm(*scan, "contiguous", _selective_scan())
    yield CallForm(*scan, "gradients", _selective_scan(True))
    yield CallForm(*scan, "past 2^31 elements", _selective_scan_long, (torch.bfloat16,), gib=30)
    update = ("mamba_ssm", "mamba_ssm.ops.triton.selective_state_update", "selective_state_update")
    yield CallForm(*update, "strided views, slots", _state_update(16))
    yield CallForm(*update, "slots past 2^31 elements", _state_update(33_000), (torch.bfloat16,), gib=10)
    norm = ("mamba_ssm", "mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn")
    yield CallForm(*norm, "groups", _norm(700))
    yield CallForm(*norm, "past 2^31 elements", _norm(2_100_000), (torch.bfloat16,), gib=20)
    package = PACKAGES[1]
    fn = (package, package, "causal_conv1d_fn")
    yield CallForm(*fn, "strided views", _convolution())
    yield CallForm(*fn, "contiguous", _convolution(channels_last=False))
    yield CallForm(*fn, "pack", _convolution(pack=True))
    yield CallForm(*fn, "gradients of a pack", _convolution(True, True))
    yield CallForm(*fn, "views past 2^31 elements", _convolution_long, (torch.bfloat16,), gib=12)
    yield CallForm(package, package, "causal_conv1d_update", "one token", _convolution_step)
    for package in ("fla", "refold"):
        for function, (name, decay, erases) in _ATTENTION.items():
            its = (package, name if package == "fla" else "refold.compat.fla", function)
            yield CallForm(*its, "contiguous", _attention(decay, erases))
            yield CallForm(*its, "pack", _attention(decay, erases, pack=True))
            if package == "refold" or function.startswith("chunk"):  # fla's recurrent ones have no gradients
                yield CallForm(*its, "gradients", _attention(decay, erases, grads=True))


CASES = tuple(_cases())
