"""The operators as torch.library ops: one node each under Dynamo, export and AOTAutograd (design decision 15).

For every spec this file registers

- ``refold::<op>(arrays..., options..., str backend)``: checks, picks the backend, runs it;
- ``refold::<op>_backward(gradients of the results, arrays, options, needs, backend)``: the gradients of the arrays that
  ``needs`` marks, in order. Only inputs are saved. A backend without its own ``<op>_backward`` uses the chunked one of
  the torch backend;
- the floating-point operations of the forward, for ``torch.utils.flop_counter``;
- ``refold::<op>_`` for steps: the same, but overwriting the state. It has no gradient.

The backend is part of the node as a string and is chosen when the node runs, so a captured graph does not depend on the
device it was captured on. Checks run in the fake kernels while tracing, and once per signature (shapes, strides,
dtypes, devices, options) in eager mode.

A decoding step has tens of microseconds of host time. The node, its autograd layer and conversions take twenty of them,
and ten times as much with gradients. So `run` makes the call a node only if something could observe it: tracing, modes,
transforms, subclasses. Gradients of other calls come from one ``torch.autograd.Function`` per operator, with the same
backward as the node.
The layers of a model call an operator with the same few signatures. So the last signatures are compared first, by
Dynamo's tensor guards: one call for all tensors, where Python takes half a microsecond per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from refold.errors import ArgumentError
from refold.ops.arrays import framework_of, keyword_arguments, meta_of
from refold.ops.backends import backend_module, resolve
from refold.ops.spec import CU_SEQLENS, OpSpec, Output, all_specs, check_cu_seqlens_values
from refold.ops.torch import private, sharded
from refold.ops.torch.nodes import (
    apart_from_autocast,
    define,
    differentiate,
    exporting_to_onnx,
    refuse_derivative,
    without_autocast,
)

Signature = tuple[Any, ...]

OPS: dict[str, Any] = {}
"""Name -> overload, with the in-place twins and the backwards."""

RUNNERS: dict[str, _Runner] = {}
"""Name -> what checks its calls and remembers the answers; in-place twins have their own."""

_FOUND_LIMIT = 4096  # Distinct signatures that are remembered; then the memory starts afresh.
_RECENT = 4  # Of them, those that are compared before one is formed.
_PLAIN_TENSORS = {type(None), Tensor, torch.nn.Parameter}
_PLAIN_OPTIONS = {type(None), bool, int, float, str, tuple, torch.dtype}


@dataclass(frozen=True)
class Operation:
    """An operator as a node of a graph: its target, and the node's arguments by name."""

    spec: OpSpec

    @property
    def name(self) -> str:
        """The operator's name."""
        return self.spec.name

    @property
    def target(self) -> Any:
        """What a node calls."""
        return OPS[self.spec.name]

    def args(self, **given: Any) -> tuple[Any, ...]:
        """Order arguments as a node has them.

        Arrays that are not given are absent, options have their defaults, and the backend is chosen when the node runs.
        """
        names = {arg.name: None for arg in self.spec.args} | {o.name: o.default for o in self.spec.options}
        if unknown := given.keys() - names.keys():
            raise TypeError(f"{self.name} has no argument {', '.join(sorted(unknown))}")
        values, arrays = list((names | given).values()), len(self.spec.args)
        return (*values[:arrays], *self.spec.written_options(values[arrays:]), "")

    def given(self, args: Sequence[Any]) -> dict[str, Any]:
        """Name a node's arguments; the inverse of `args`."""
        names = [arg.name for arg in self.spec.args] + [option.name for option in self.spec.options]
        arrays = len(self.spec.args)
        return dict(zip(names, [*args[:arrays], *self.spec.unwritten_options(args[arrays:-1])], strict=True))


def operation(form: str) -> Operation:
    """Find the operator that computes a form (`OpSpec.form`)."""
    return next(Operation(spec) for spec in all_specs() if spec.form == form)


@private.apart_from_default_device
def run(name: str, arrays: Sequence[Any], options: Sequence[Any], backend: str) -> Any:
    """Run the op ``name``: as a dispatcher node where something could see one, else directly."""
    watched, runner = private.watched(), RUNNERS[name]
    if not watched:
        for known in runner.recent:
            if known.holds(arrays, options, backend):
                return runner.follow(known.run, known.requires_grad, arrays, options, backend)
    if sharded.given(arrays):
        return sharded.run(runner.spec, name, arrays, options, lambda local: run(name, local, options, backend))
    framework_of(runner.spec, arrays)
    options = runner.spec.plain_options(options)
    if not watched:
        _check_options(runner.spec, options)
        if is_plain(arrays, options):
            return runner(arrays, options, backend)
    if runner.in_place:
        refuse_gradients(name, arrays)
        if not torch.compiler.is_compiling():  # a graph writes to what it made itself, or to what it was given
            _refuse_negated(runner.spec, arrays)
    _refuse_tangents(name, arrays)
    _refuse_transforms(name, arrays)
    if exporting_to_onnx():  # which has none of the operators, but all that the torch backend is made of
        return _composed(runner, arrays, options)
    return OPS[name](*arrays, *runner.spec.written_options(options), backend)


def run_alone(name: str, arrays: Sequence[Any], options: Sequence[Any], backend: str) -> Any:
    """Run the op ``name`` inside of another, of tensors and options as nodes get them, without a gradient."""
    runner = RUNNERS[name]
    if private.watched():
        return OPS[name](*arrays, *runner.spec.written_options(options), backend)
    for known in runner.recent:
        if known.holds(arrays, options, backend):
            return known.run(*arrays)
    return runner(arrays, options, backend)


def gradients_alone(
    name: str, gradients: Sequence[Any], arrays: Sequence[Any], options: Sequence[Any], needs: Sequence[bool],
    backend: str,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients that ``needs`` marks of the op ``name``, which runs inside of another: see `run_alone`."""
    spec = RUNNERS[name].spec
    run = OPS[f"{name}_backward"] if private.watched() else partial(_backward, spec, RUNNERS[name])
    found: list[Tensor] = run(*gradients, *arrays, *spec.written_options(options), list(needs), backend)
    return found


def prepared(spec: OpSpec, arrays: Sequence[Any], options: Sequence[Any]) -> tuple[Any, ...]:
    """Return options as nodes take them, once it is known that arguments are what a node can take."""
    framework_of(spec, arrays)
    options = spec.plain_options(options)
    _check_options(spec, options)
    _refuse_tangents(spec.name, arrays)
    _refuse_transforms(spec.name, arrays)
    return options


def _composed(runner: _Runner, arrays: Sequence[Tensor | None], options: Sequence[Any]) -> Any:
    """Return the results of a call as the torch backend computes them, operation by operation."""
    spec = runner.spec
    spec.validate(meta_of(spec, "torch", arrays, options))
    results = getattr(backend_module(spec, "torch"), spec.name)(**keyword_arguments(spec, arrays, options))
    if not runner.in_place:
        return results
    y, state = results
    arrays[spec.updates_at].copy_(state)  # type: ignore[union-attr]
    return y


def _check_options(spec: OpSpec, options: Sequence[Any]) -> None:
    """Refuse values that fit no schema, and dtypes of others, before PyTorch refuses them without a remedy."""
    spec.check_options(options)
    for option, value in zip(spec.options, options, strict=True):
        if option.schema.startswith("ScalarType") and not isinstance(value, torch.dtype | None):
            expected = option.expected.replace("dtype", "torch.dtype")
            raise ArgumentError(f"{spec.name}: {option.name} must be {expected}; got {value!r}.")


def is_plain(arrays: Sequence[Tensor | None], options: Sequence[Any]) -> bool:
    """Whether a call has nothing that only the dispatcher treats: subclasses, signs not yet applied, no memory."""
    if not (_PLAIN_TENSORS.issuperset(map(type, arrays)) and _PLAIN_OPTIONS.issuperset(map(type, options))):
        return False
    return not any(a is not None and (a.is_neg() or a.is_meta or private.has_no_memory(a)) for a in arrays)


def signature_of(arrays: Sequence[Tensor | None], options: Sequence[Any], backend: str) -> Signature:
    """Return all that checks, the choice of a backend and its plans may depend on."""
    return (
        *[a if a is None else (a.shape, a.stride(), a.dtype, a.device, a.data_ptr() % 16) for a in arrays],
        *options,
        *map(type, options),  # 1, 1.0 and True are equal
        backend,
    )


class _Known:
    """The function that runs a plain call, and a quick test whether another call has the same signature.

    The guards compare types, dispatch keys, dtypes, devices, shapes, strides and requires_grad, so that a call that
    holds is a plain one too, and one under ``torch.autocast`` only if that one was. They refuse a tensor that is given
    twice; they get it once.
    """

    __slots__ = ("addresses", "backend", "copies", "guards", "options", "places", "requires_grad", "run", "types")

    def __init__(
        self, arrays: Sequence[Tensor | None], options: Sequence[Any], backend: str, run: Callable[..., Any]
    ) -> None:
        first = [next(i for i, other in enumerate(arrays) if other is array) for array in arrays]
        self.places = [i for i in sorted(set(first)) if arrays[i] is not None]
        self.copies = [(i, j) for i, j in enumerate(first) if i != j and arrays[i] is not None]
        given = [a for i in self.places if (a := arrays[i]) is not None]
        # Lists of what may be None, for sizes that Dynamo lets vary; here all are compared.
        sizes: Any = [list(a.shape) for a in given]
        strides: Any = [list(a.stride()) for a in given]
        self.guards = private.TensorGuards(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self.requires_grad = any(a.requires_grad for a in given)
        self.addresses = [a.data_ptr() % 16 for a in given]
        self.types = [*map(type, arrays), *map(type, options)]
        self.options = options
        self.backend = backend
        self.run = run

    def holds(self, arrays: Sequence[Any], options: Sequence[Any], backend: str) -> bool:
        """Whether a call with these arguments may run what this one runs."""
        if [*map(type, arrays), *map(type, options)] != self.types:  # None is a type too; 1, 1.0 and True are equal
            return False
        given = [arrays[i] for i in self.places]
        # The guards would end the process at a nested tensor. A list: a generator takes twice as long.
        if True in [a.is_nested for a in given]:
            return False
        return (
            self.guards.check(*given)
            and [a.data_ptr() % 16 for a in given] == self.addresses
            and options == self.options
            and backend == self.backend
            and not (self.copies and any(arrays[i] is not arrays[j] for i, j in self.copies))
        )


class _Runner:
    """Checks a call and finds what runs it, once per signature."""

    def __init__(self, spec: OpSpec, in_place: bool = False) -> None:
        self.spec = spec
        self.in_place = in_place
        names = [a.name for a in spec.args]
        self.offsets = names.index(CU_SEQLENS) if CU_SEQLENS in names else None
        self.found: dict[Signature, Callable[..., Any]] = {}
        self.known: dict[tuple[bool, Signature], _Known] = {}
        self.recent: tuple[_Known, ...] = ()  # Replaced as a whole: other threads may be reading it.
        self.differentiable: Any = None if in_place else _differentiable(spec, self)

    def __call__(self, arrays: Sequence[Tensor | None], options: Sequence[Any], backend: str) -> Any:
        """Return the results of a plain call."""
        signature = signature_of(arrays, options, backend)
        device = arrays[0].device.type  # type: ignore[union-attr]
        cast = torch.is_autocast_enabled(device)
        known = self.known.get((cast, signature))
        if known is None or not known.holds(arrays, options, backend):
            run = self._remembered(signature, arrays, options, backend)
            run = partial(without_autocast, device, run) if cast else run
            if private.TensorGuards is None:
                requires_grad = any(a is not None and a.requires_grad for a in arrays)
                return self.follow(run, requires_grad, arrays, options, backend)
            known = self.known[cast, signature] = _Known(arrays, options, backend, run)
        self.recent = (known, *[other for other in self.recent if other is not known][: _RECENT - 1])
        return self.follow(known.run, known.requires_grad, arrays, options, backend)

    def follow(
        self, run: Callable[..., Any], requires_grad: bool, arrays: Sequence[Any], options: Sequence[Any], backend: str
    ) -> Any:
        """Run a plain call, with a gradient if one may be asked for."""
        if not (requires_grad and torch.is_grad_enabled()):
            return run(*arrays)
        if self.differentiable is None:
            refuse_gradients(f"{self.spec.name}_", arrays)
        return self.differentiable.apply(*arrays, *options, backend, run)

    def node(self, *args: Any) -> Any:
        """Run the op as the dispatcher calls it."""
        narrays = len(self.spec.args)
        arrays, options = args[:narrays], self.spec.unwritten_options(args[narrays:-1])
        return self._remembered(signature_of(arrays, options, args[-1]), arrays, options, args[-1])(*arrays)

    def _remembered(
        self, signature: Signature, arrays: Sequence[Tensor | None], options: Sequence[Any], backend: str
    ) -> Callable[..., Any]:
        found = self.found.get(signature)
        if found is None:
            if len(self.found) >= _FOUND_LIMIT:
                self.found.clear()
                self.known.clear()
            found = self.found[signature] = self._find(arrays, options, backend)
        return found

    def differentiated(
        self, gradients: Sequence[Tensor | None], arrays: Sequence[Tensor | None], options: Sequence[Any],
        needs: Sequence[bool], backend: str,
    ) -> list[Tensor]:  # fmt: skip
        """Return the gradients of the arrays that ``needs`` marks, in order."""
        signature = (*signature_of((*gradients, *arrays), options, backend), *needs)
        found = self.found.get(signature)
        if found is None:
            found = self._find_backward(gradients, arrays, options, needs, backend)
            if len(self.found) >= _FOUND_LIMIT:
                self.found.clear()
                self.known.clear()
            self.found[signature] = found
        result: list[Tensor] = found(*gradients, *arrays)
        return result

    def _find_backward(
        self, gradients: Sequence[Tensor | None], arrays: Sequence[Tensor | None], options: Sequence[Any],
        needs: Sequence[bool], backend: str,
    ) -> Callable[..., list[Tensor]]:  # fmt: skip
        """Return a function of the gradients and arrays; a backend without a backward has that of the torch backend."""
        spec, name = self.spec, f"{self.spec.name}_backward"
        run = getattr(self.module(arrays, options, backend), name, None)
        run = run or getattr(backend_module(spec, "torch"), name)
        wanted = [arg.name for arg, need in zip(spec.args, needs, strict=True) if need]

        def named(*arrays: Tensor | None) -> dict[str, Any]:
            first = {f"d{o.name}": g for o, g in zip(spec.outputs, arrays, strict=False)}
            given = keyword_arguments(spec, arrays[len(spec.outputs) :], options)
            return first | given | {"needs": frozenset(wanted)}

        plan = getattr(run, "plan", None)
        bound = plan(**named(*gradients, *arrays)) if plan else lambda *arrays: run(**named(*arrays))
        dtypes = {arg.name: a.dtype for arg, a in zip(spec.args, arrays, strict=True) if a is not None}

        def differentiated(*arrays: Tensor | None) -> list[Tensor]:
            found = bound(*arrays)
            return [found[n].to(dtypes[n]).contiguous() for n in wanted]

        return differentiated

    def module(self, arrays: Sequence[Tensor | None], options: Sequence[Any], backend: str) -> ModuleType:
        """Check the arguments and return the file of the backend."""
        return resolve(self.spec, self.spec.validate(meta_of(self.spec, "torch", arrays, options)), backend)

    def _empty(self, arrays: Sequence[Tensor | None], options: Sequence[Any]) -> Callable[..., Any]:
        """Make a function that gives the results of an empty batch, which no backend has to know of."""
        metas = self.spec.output_metas(self.spec.validate(meta_of(self.spec, "torch", arrays, options)))
        metas = metas[:1] if self.in_place else metas

        def run(first: Tensor, *rest: Any) -> Any:
            results = tuple(first.new_zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in metas)
            return results if len(results) > 1 else results[0]

        return run

    def _find(self, arrays: Sequence[Tensor | None], options: Sequence[Any], backend: str) -> Callable[..., Any]:
        """Return a function of the arrays."""
        module, name = self.module(arrays, options, backend), self.spec.name
        if _is_empty(arrays):
            return self._empty(arrays, options)
        if self.in_place:
            return self._updating(module, arrays, options, backend)
        found = _bound(self.spec, getattr(module, name), arrays, options)
        at = self.offsets
        if at is None or (offsets := arrays[at]) is None or offsets.device.type != "cpu":
            return found
        seqlen = next(a for a in arrays if a is not None).shape[1]

        def checked(*arrays: Any) -> Any:
            check_cu_seqlens_values(name, arrays[at].tolist(), seqlen)
            return found(*arrays)

        return checked

    def _updating(
        self, module: ModuleType, arrays: Sequence[Tensor | None], options: Sequence[Any], backend: str
    ) -> Callable[..., Tensor]:
        at = self.spec.updates_at
        state = arrays[at]
        assert state is not None
        refuse_overlap(self.spec, state)
        # A backend's own in-place twin writes the state as it goes; all else pays one copy of the state.
        in_place = getattr(module, f"{self.spec.name}_", None)
        if in_place is None or not (state.is_contiguous() or self.spec.updates_strided):
            step = _bound(self.spec, getattr(module, self.spec.name), arrays, options)

            def write(*arrays: Any) -> Tensor:
                y, new_state = step(*arrays)
                arrays[at].copy_(new_state)
                return y
        else:
            direct, size = _bound(self.spec, in_place, arrays, options), _extent(state)
            others = [(i, _extent(a)) for i, a in enumerate(arrays) if i != at and a is not None]

            def write(*arrays: Any) -> Tensor:
                start = arrays[at].data_ptr()
                shared = {i for i, extent in others if -extent < arrays[i].data_ptr() - start < size}
                if not shared:
                    return direct(*arrays)  # type: ignore[no-any-return]
                # What lies in the state's memory would be written before it is read.
                apart = [a.clone() if i in shared else a for i, a in enumerate(arrays)]
                signature = signature_of(apart, options, backend)
                return self._remembered(signature, apart, options, backend)(*apart)  # type: ignore[no-any-return]

        def updating(*arrays: Any) -> Tensor:
            y = write(*arrays)
            torch.autograd.graph.increment_version(arrays[at])
            return y

        return updating


def _extent(x: Tensor) -> int:
    """Return the bytes from the first element to the end of the last one."""
    return (1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _may_overlap_itself(x: Tensor) -> bool:
    """Whether two elements may lie in one place: some axis steps less than all shorter steps together reach."""
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def refuse_overlap(spec: OpSpec, state: Tensor) -> None:
    """Raise at a state of which two elements lie in one place, if it is to be written."""
    if _may_overlap_itself(state):
        raise ArgumentError(
            f"{spec.name}_: the elements of {spec.updates} must not share memory; got the shape {tuple(state.shape)} "
            f"with the strides {state.stride()}. Pass {spec.updates}.clone()."
        )


def _is_empty(arrays: Sequence[Tensor | None]) -> bool:
    """Whether a call that was checked has a batch of nothing: the first argument has all axes that may be empty."""
    return arrays[0] is not None and arrays[0].numel() == 0


def _bound(
    spec: OpSpec, function: Callable[..., Any], arrays: Sequence[Tensor | None], options: Sequence[Any]
) -> Callable[..., Any]:
    """Return ``function`` as a function of the arrays alone: its plan for this signature, if it makes plans."""
    if (plan := getattr(function, "plan", None)) is not None:
        planned: Callable[..., Any] = plan(**keyword_arguments(spec, arrays, options))
        return planned
    return lambda *arrays: function(**keyword_arguments(spec, arrays, options))


def _register(spec: OpSpec) -> None:
    runner = RUNNERS[spec.name] = _Runner(spec)
    arrays = ", ".join(f"Tensor{'?' if a.optional else ''} {a.name}" for a in spec.args)
    options = "".join(f", {o.schema} {o.name}" for o in spec.options)
    results = "(" + ", ".join("Tensor" for _ in spec.outputs) + ")"
    schema = f"({arrays}{options}, str backend) -> {results}"
    OPS[spec.name] = define(spec.name, schema, runner.node, partial(_forward_fake, spec), padded=True)
    gradients = ", ".join(f"Tensor? d{o.name}" for o in spec.outputs)
    OPS[f"{spec.name}_backward"] = define(
        f"{spec.name}_backward",
        f"({gradients}, {arrays}{options}, bool[] needs, str backend) -> Tensor[]",
        partial(_backward, spec, runner),
        partial(_backward_fake, spec),
        padded=True,
    )
    refuse_derivative(f"{spec.name}_backward")
    differentiate(spec.name, _autograd_backward(spec, runner), _setup_context(spec))
    register_flop_formula(getattr(torch.ops.refold, spec.name), get_raw=True)(partial(_flops, spec))
    if spec.updates:
        written = arrays.replace(f"Tensor {spec.updates}", f"Tensor(a!) {spec.updates}")
        twin = RUNNERS[f"{spec.name}_"] = _Runner(spec, in_place=True)
        OPS[f"{spec.name}_"] = define(
            f"{spec.name}_",
            f"({written}{options}, str backend) -> Tensor",
            twin.node,
            lambda *args: _forward_fake(spec, *args)[0],
            padded=True,
        )


def _flops(spec: OpSpec, *args: Any, out_val: Any = None) -> int:
    """Count the operations of a call for torch's flop counter: those of its sequential definition."""
    arrays, options = args[: len(spec.args)], spec.unwritten_options(args[len(spec.args) : -1])
    return spec.flops(spec.validate(meta_of(spec, "torch", arrays, options)).sizes)


def _forward_fake(spec: OpSpec, *args: Any) -> Any:
    arrays, backend = args[: len(spec.args)], args[-1]
    options = spec.unwritten_options(args[len(spec.args) : -1])
    meta = spec.validate(meta_of(spec, "torch", arrays, options))
    resolve(spec, meta, backend)
    results = tuple(arrays[0].new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in spec.output_metas(meta))
    return results if len(results) > 1 else results[0]


def _backward(spec: OpSpec, runner: _Runner, *args: Any) -> list[Tensor]:
    ngradients = len(spec.outputs)
    gradients, inputs, needs, backend = args[:ngradients], args[ngradients:-2], args[-2], args[-1]
    arrays, options = inputs[: len(spec.args)], inputs[len(spec.args) :]
    if _is_empty(arrays):
        return [a.new_zeros(a.shape) for a, need in zip(arrays, needs, strict=True) if need]
    return runner.differentiated(gradients, arrays, spec.unwritten_options(options), needs, backend)


def _backward_fake(spec: OpSpec, *args: Any) -> list[Tensor]:
    inputs, needs = args[len(spec.outputs) : -2], args[-2]
    arrays = inputs[: len(spec.args)]
    return [a.new_empty(a.shape) for a, need in zip(arrays, needs, strict=True) if need]


def _setup_context(spec: OpSpec) -> Callable[..., None]:
    narrays, reads = len(spec.args), [_reads(spec, output) for output in spec.outputs]

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        # A state that is carried on must not hold a graph that it does not depend on.
        needed = {arg.name for arg, need in zip(spec.args, ctx.needs_input_grad, strict=False) if need}
        results = zip(output if isinstance(output, tuple) else (output,), reads, strict=True)
        ctx.mark_non_differentiable(*(y for y, names in results if not needed & names))
        ctx.save_for_backward(*inputs[:narrays])
        ctx.options = inputs[narrays:]
        ctx.set_materialize_grads(False)

    return setup_context


def _differentiable(spec: OpSpec, runner: _Runner) -> Any:
    """Return a plain call of an operator as a function of autograd: arrays, options, backend, and what runs it."""
    narrays, save, gradients = len(spec.args), _setup_context(spec), _autograd_backward(spec, runner)

    def forward(ctx: Any, *inputs: Any) -> Any:
        results = inputs[-1](*inputs[:narrays])
        save(ctx, inputs[:-1], results)
        return results

    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        return (*gradients(ctx, *given), None)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(spec.name, (torch.autograd.Function,), members)


def _reads(spec: OpSpec, output: Output) -> set[str]:
    """Return the names of the arguments that a result depends on."""
    others = {name for other in spec.outputs if other is not output for name in other.alone}
    return {arg.name for arg in spec.args if arg.differentiable} - others


def _autograd_backward(spec: OpSpec, runner: _Runner) -> Callable[..., Any]:
    narrays, noptions, name = len(spec.args), len(spec.options), f"{spec.name}_backward"
    plain = apart_from_autocast(partial(_backward, spec, runner))

    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if all(g is None for g in gradients):
            return (None,) * (narrays + noptions + 1)
        # An argument that only an unused result reads has no gradient, and an infinity in it reaches no other.
        idle = {name for output, g in zip(spec.outputs, gradients, strict=True) if g is None for name in output.alone}
        arrays, needs = list(ctx.saved_tensors), []
        for at, (arg, need) in enumerate(zip(spec.args, ctx.needs_input_grad[:narrays], strict=True)):
            needs.append(need and arg.differentiable and arg.name not in idle)
            if arg.name in idle and arrays[at] is not None:
                arrays[at] = None if arg.optional else torch.zeros_like(arrays[at])
        *options, backend = ctx.options
        # With gradients enabled (create_graph), the node says that there is no second derivative.
        direct = not (private.watched() or torch.is_grad_enabled()) and is_plain((*gradients, *arrays), options)
        options = spec.written_options(options)
        found = iter((plain if direct else OPS[name])(*gradients, *arrays, *options, needs, backend))
        return tuple(next(found) if need else None for need in needs) + (None,) * (noptions + 1)

    return backward


def refuse_gradients(op: str, arrays: Sequence[Any]) -> None:
    """Raise if an in-place call would have to be differentiated."""
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arrays):
        raise ArgumentError(f"{op}: it overwrites the state and has no gradient. Use {op[:-1]}, or torch.no_grad().")


def _refuse_negated(spec: OpSpec, arrays: Sequence[Any]) -> None:
    """Raise at a state whose memory does not hold its values: PyTorch negates them later, or makes zeros of nothing."""
    state = arrays[spec.updates_at]
    if isinstance(state, Tensor) and (state.is_neg() or private.has_no_memory(state)):
        raise ArgumentError(
            f"{spec.name}_: {spec.updates} must be a tensor that can be written; it is a view that PyTorch negates, or "
            f"zeros without memory. Pass {spec.updates}.resolve_neg().clone()."
        )


def _refuse_tangents(op: str, arrays: Sequence[Any]) -> None:
    """Raise where a forward-mode derivative would be zero without a word."""
    if getattr(forward_ad, "_current_level", 0) < 0:
        return
    if any(a is not None and forward_ad.unpack_dual(a).tangent is not None for a in arrays):
        raise ArgumentError(f"{op}: it has no forward-mode derivative. Use reverse mode: torch.autograd.grad.")


def _refuse_transforms(op: str, arrays: Sequence[Any]) -> None:
    """Raise where ``torch.func`` would differentiate; PyTorch's own error has no remedy for a user."""
    if not torch.compiler.is_compiling() and any(a is not None and private.is_transformed(a) for a in arrays):
        raise ArgumentError(f"{op}: torch.func cannot differentiate it. Use backward() or torch.autograd.grad.")


for _spec in all_specs():
    _register(_spec)
