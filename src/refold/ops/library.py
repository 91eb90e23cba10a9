"""The operators as torch.library ops: one node each under Dynamo, export and AOTAutograd.

For every spec this file registers

- ``refold::<op>(arrays..., options..., str backend)``: checks, picks the backend, runs it;
- ``refold::<op>_backward(gradients of the results, arrays, options, needs, backend)``: the gradients of the arrays that
  ``needs`` marks, in order. Inputs are all that is saved; a backend without a ``<op>_backward`` of its own uses the
  chunked one of the torch backend;
- the floating-point operations of the forward, for ``torch.utils.flop_counter``;
- ``refold::<op>_`` for steps: the same, but overwriting the state. It has no gradient.

The backend is part of the node as a string and is chosen when the node runs, so a graph captured on one device keeps
no trace of it. Checks run in the fake kernels while tracing, and once a combination of shapes, dtypes and options in
eager mode. The low-level registration is used because ``torch.library.custom_op`` costs 9 us a call where this costs 4
(one EPYC core), and a decoding step has only tens of them to spend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from refold.errors import ArgumentError
from refold.ops.dispatch import backend_module, keyword_arguments, meta_of, resolve
from refold.ops.spec import CU_SEQLENS, OpSpec, all_specs, check_cu_seqlens_values

OPS: dict[str, Any] = {}
"""Name -> overload, with the in-place twins and the backwards."""

RUNNERS: dict[str, _Runner] = {}
"""Name -> what checks its calls and remembers the answers."""

_LIBRARY = torch.library.Library("refold", "FRAGMENT")
_RESOLVED_LIMIT = 4096  # Distinct calls whose checks are remembered; then the memory starts afresh.


class _Runner:
    """Checks a call and finds its function, once for each combination of shapes, dtypes and options."""

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        self.narrays = len(spec.args)
        names = [a.name for a in spec.args]
        self.offsets = names.index(CU_SEQLENS) if CU_SEQLENS in names else None
        self.resolved: dict[Any, tuple[ModuleType, int]] = {}

    def __call__(self, *args: Any) -> tuple[ModuleType, dict[str, Any]]:
        """Return the backend's file and the keyword arguments of its function."""
        arrays, options, backend = args[: self.narrays], args[self.narrays : -1], args[-1]
        key = tuple((a.shape, a.dtype, a.device) if isinstance(a, Tensor) else _hashable(a) for a in args)
        found = self.resolved.get(key)
        if found is None:
            meta = self.spec.validate(meta_of(self.spec, "torch", arrays, options))
            if len(self.resolved) >= _RESOLVED_LIMIT:
                self.resolved.clear()
            found = self.resolved[key] = resolve(self.spec, meta, backend), meta.sizes.get("t", 1)
        module, seqlen = found
        if self.offsets is not None and (offsets := arrays[self.offsets]) is not None and offsets.device.type == "cpu":
            check_cu_seqlens_values(self.spec.name, offsets.tolist(), seqlen)
        return module, keyword_arguments(self.spec, arrays, options)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _register(spec: OpSpec) -> None:
    runner = RUNNERS[spec.name] = _Runner(spec)
    arrays = ", ".join(f"Tensor{'?' if a.optional else ''} {a.name}" for a in spec.args)
    options = "".join(f", {o.schema} {o.name}" for o in spec.options)
    results = "(" + ", ".join("Tensor" for _ in spec.outputs) + ")"
    _define(spec.name, f"({arrays}{options}, str backend) -> {results}", _forward(runner), _forward_fake(spec))
    gradients = ", ".join(f"Tensor? d{o.name}" for o in spec.outputs)
    _define(
        f"{spec.name}_backward",
        f"({gradients}, {arrays}{options}, bool[] needs, str backend) -> Tensor[]",
        _backward(spec, runner),
        _backward_fake(spec),
    )
    torch.library.register_autograd(
        f"refold::{spec.name}", _autograd_backward(spec), setup_context=_setup_context(spec), lib=_LIBRARY
    )
    register_flop_formula(getattr(torch.ops.refold, spec.name), get_raw=True)(_flops(spec))
    if spec.updates:
        written = arrays.replace(f"Tensor {spec.updates}", f"Tensor(a!) {spec.updates}")
        _define(
            f"{spec.name}_",
            f"({written}{options}, str backend) -> Tensor",
            _forward_in_place(spec, runner),
            lambda *args: _forward_fake(spec)(*args)[0],
        )


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"refold::{name}", fake, lib=_LIBRARY)
    OPS[name] = getattr(torch.ops.refold, name).default


def _flops(spec: OpSpec) -> Callable[..., int]:
    """Return the formula of an operator for torch's flop counter: that of its sequential definition."""

    def flops(*args: Any, out_val: Any = None) -> int:
        arrays, options = args[: len(spec.args)], args[len(spec.args) : -1]
        return spec.flops(spec.validate(meta_of(spec, "torch", arrays, options)).sizes)

    return flops


def _forward(runner: _Runner) -> Callable[..., Any]:
    name = runner.spec.name

    def forward(*args: Any) -> Any:
        module, keywords = runner(*args)
        return getattr(module, name)(**keywords)

    return forward


def _forward_fake(spec: OpSpec) -> Callable[..., Any]:
    def fake(*args: Any) -> Any:
        arrays, options, backend = args[: len(spec.args)], args[len(spec.args) : -1], args[-1]
        meta = spec.validate(meta_of(spec, "torch", arrays, options))
        resolve(spec, meta, backend)
        results = tuple(
            arrays[0].new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in spec.output_metas(meta)
        )
        return results if len(results) > 1 else results[0]

    return fake


def _forward_in_place(spec: OpSpec, runner: _Runner) -> Callable[..., Any]:
    at = next(i for i, arg in enumerate(spec.args) if arg.name == spec.updates)

    def forward(*args: Any) -> Tensor:
        module, keywords = runner(*args)
        state = args[at]
        # A backend's own in-place twin writes as it goes; the others pay one copy of the state.
        if (in_place := getattr(module, f"{spec.name}_", None)) is not None:
            y = in_place(**keywords)
        else:
            y, new_state = getattr(module, spec.name)(**keywords)
            state.copy_(new_state)
        torch.autograd.graph.increment_version(state)
        return y

    return forward


def _backward(spec: OpSpec, runner: _Runner) -> Callable[..., Any]:
    ngradients, name = len(spec.outputs), f"{spec.name}_backward"

    def backward(*args: Any) -> list[Tensor]:
        gradients, inputs, needs, backend = args[:ngradients], args[ngradients:-2], args[-2], args[-1]
        module, keywords = runner(*inputs, backend)
        run = getattr(module, name, None) or getattr(backend_module(spec, "torch"), name)
        wanted = [arg.name for arg, need in zip(spec.args, needs, strict=True) if need]
        named = {f"d{o.name}": g for o, g in zip(spec.outputs, gradients, strict=True)}
        found = run(**named, **keywords, needs=frozenset(wanted))
        return [found[n].to(keywords[n].dtype).contiguous() for n in wanted]

    return backward


def _backward_fake(spec: OpSpec) -> Callable[..., Any]:
    def fake(*args: Any) -> list[Tensor]:
        inputs, needs = args[len(spec.outputs) : -2], args[-2]
        arrays = inputs[: len(spec.args)]
        return [a.new_empty(a.shape) for a, need in zip(arrays, needs, strict=True) if need]

    return fake


def _setup_context(spec: OpSpec) -> Callable[..., None]:
    narrays = len(spec.args)

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        ctx.save_for_backward(*inputs[:narrays])
        ctx.options = inputs[narrays:]
        ctx.set_materialize_grads(False)

    return setup_context


def _autograd_backward(spec: OpSpec) -> Callable[..., Any]:
    narrays, noptions = len(spec.args), len(spec.options)

    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        arrays = ctx.saved_tensors
        needs = [
            need and arg.differentiable for arg, need in zip(spec.args, ctx.needs_input_grad[:narrays], strict=True)
        ]
        if all(g is None for g in gradients):
            return (None,) * (narrays + noptions + 1)
        found = iter(OPS[f"{spec.name}_backward"](*gradients, *arrays, *ctx.options[:-1], needs, ctx.options[-1]))
        return tuple(next(found) if need else None for need in needs) + (None,) * (noptions + 1)

    return backward


def refuse_gradients(op: str, arrays: Sequence[Any]) -> None:
    """Raise if an in-place call would have to be differentiated."""
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arrays):
        raise ArgumentError(f"{op}: it overwrites the state and has no gradient. Use {op[:-1]}, or torch.no_grad().")


for _spec in all_specs():
    _register(_spec)
