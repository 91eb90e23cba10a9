"""The ways in which users call a program and give it weights, as the process of a trial carries them out.

Each changes the call in one respect; `messages.USES` has their names. That process loads this file by its path.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

Build = Callable[[list[torch.Tensor]], Any]  # arguments from tensors
_APART = 13  # elements between the parts of one tensor


class _Around(torch.nn.Module):
    """A call of a module that is a part of this one."""

    def __init__(self, module: torch.nn.Module, run: Callable[[], Any]):
        super().__init__()
        self.module, self.run = module, run

    def forward(self) -> Any:
        return self.run()


def run(use: str, call: Callable[[], Any], module: torch.nn.Module | None, state: dict[str, torch.Tensor]) -> Any:
    """Make a call and its backward, with other parameters and buffers or in a thread of its own, if so asked."""
    if module is not None and state:
        # The backward, too: what torch.utils.checkpoint computes once more there needs the same weights.
        others = {f"module.{name}": t for name, t in state.items()}
        return torch.func.functional_call(_Around(module, call), others, ())
    if use != "thread":
        return call()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@contextlib.contextmanager
def around(use: str) -> Iterator[None]:
    """Set what a user has set who calls it so."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    if use == "float64":
        torch.set_default_dtype(torch.float64)
    if use == "threads":
        torch.set_num_threads(1 if threads > 1 else 2)
    elsewhere = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
    try:
        with elsewhere if use == "kept elsewhere" else contextlib.nullcontext():
            yield
    finally:  # but leave what the program has set itself
        if use == "float64":
            torch.set_default_dtype(dtype)
        if use == "threads":
            torch.set_num_threads(threads)


def given(use: str, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that a user gives in place of these."""
    if use == "own memory":
        return [t.detach().clone().requires_grad_(t.requires_grad) for t in leaves]
    if use == "conjugate":
        return [t.detach().conj().resolve_conj().conj().requires_grad_(t.requires_grad) for t in leaves]
    if use in ("parts", "overlapping"):
        ends, kinds = [*itertools.accumulate(t.numel() + _APART for t in leaves)], {(t.dtype, t.device) for t in leaves}
        wholes = {kind: torch.zeros(ends[-1], dtype=kind[0], device=kind[1]) for kind in kinds}
        if use == "parts":
            places = [end - t.numel() for end, t in zip(ends, leaves, strict=True)]
            return [_part(t, wholes[t.dtype, t.device], at) for t, at in zip(leaves, places, strict=True)]
        return [_part(t, wholes[t.dtype, t.device], at) if _real(t) else t for at, t in enumerate(leaves)]
    return leaves


def _part(t: torch.Tensor, whole: torch.Tensor, at: int) -> torch.Tensor:
    part = whole[at : at + t.numel()].view(t.shape)
    with torch.no_grad():
        part.copy_(t)
    return part.detach().requires_grad_() if t.requires_grad else part


def given_back(own: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
    """Write what has become of these tensors where the judge looks at it."""
    for mine, t in zip(own, leaves, strict=True):
        if mine is not t:
            t.data.copy_(mine.data)


def call(
    use: str, program: Any, args: Any, build: Build, leaves: list[torch.Tensor], device: str, train: bool, seed: int
) -> Any:
    """Call a program with arguments, which ``build`` makes of these tensors."""
    if use == "autocast":
        with torch.autocast(device, torch.bfloat16):
            return program(*args)
    if use == "keywords":
        return program(**args)
    if use == "forward":
        return getattr(program, "forward", program)(*args)
    if use == "in a backward":
        return _in_a_backward(lambda: program(*args), train)
    if use in ("jvp", "vjp"):
        return _derivatives(use, program, build, leaves, train, seed)
    if use == "vmap":
        rng, some = random.Random(seed), [index for index, t in enumerate(leaves) if _real(t)]
        alone = rng.choice(some) if len(some) > 1 else -1
        axes = [
            rng.randint(min(1, t.dim()), t.dim()) if i in some and i != alone else None for i, t in enumerate(leaves)
        ]
        pairs = zip(axes, leaves, _others(leaves, 1), strict=True)
        both = [t if axis is None else torch.stack((t, other), axis) for axis, t, other in pairs]
        mapped = torch.func.vmap(lambda *some: program(*build(list(some))), tuple(axes))
        return _derivatives("vjp", mapped, list, both, train, seed) if train else mapped(*both)
    if use == "same objects":
        values = [t.detach().clone() for t in leaves]
        for t, other in zip(leaves, _others(leaves, 1), strict=True):
            t.data.copy_(other)
        program(*build(leaves))
        for t, value in zip(leaves, values, strict=True):
            t.data.copy_(value)
    return program(*args)


def afterwards(
    use: str, program: Any, build: Build, own: list[torch.Tensor], results: list[torch.Tensor],
    back: Callable[[Any, Any], Any],
) -> None:  # fmt: skip
    """Do what a user does after a call, before its results are used or gradients flow back (``back``)."""
    if use == "changed":
        for t in filter(_real, results):
            t.mul_(2)
    if use == "between":
        for turn in (1, 2):
            others = _others(own, turn)
            back(program(*build(others)), others)
    if use == "overwritten":
        with torch.no_grad():
            for t in own:
                t.copy_(t.clone().reshape(-1).roll(1).reshape(t.shape))


def _in_a_backward(call: Callable[[], Any], train: bool) -> Any:
    found: list[Any] = []
    leaf = torch.ones((), requires_grad=True)
    with torch.enable_grad():
        other = leaf * 1
    other.register_hook(lambda _: found.append(call()))
    torch.autograd.grad(other, leaf, create_graph=train)
    return found[0]


def _others(leaves: list[torch.Tensor], turn: int) -> list[torch.Tensor]:
    """Return tensors with the same numbers in another order; integers, which may be positions, stay."""
    return [t.detach().roll(turn).requires_grad_(t.requires_grad) if _real(t) else t.clone() for t in leaves]


def _real(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _derivatives(use: str, program: Any, build: Build, leaves: list[torch.Tensor], train: bool, seed: int) -> Any:
    """Return results, in training with derivatives along a random direction, in forward mode or in reverse mode."""
    g = torch.Generator().manual_seed(seed)
    at = [index for index, t in enumerate(leaves) if _real(t)]

    def function(*some: torch.Tensor) -> Any:
        changed = dict(zip(at, some, strict=True))
        return program(*build([changed.get(index, t) for index, t in enumerate(leaves)]))

    def along(some: Any) -> tuple[torch.Tensor, ...]:
        return tuple(noise(t, g) for t in some)

    some = tuple(leaves[index] for index in at)
    if use == "jvp":
        return torch.func.jvp(function, some, along(some))
    results, back, *_ = torch.func.vjp(function, *some)
    if not train:
        return results
    return results, back(noise(results, g) if isinstance(results, torch.Tensor) else along(results))


def noise(t: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Draw zero-mean numbers like those of a tensor."""
    return torch.randn(t.shape, generator=g, dtype=torch.complex64 if t.is_complex() else torch.float32).to(t)


def adopt(
    way: str, module: Any, values: dict[str, torch.Tensor], given: dict[str, torch.Tensor], device: str,
    another: Callable[[bool], Any],
) -> Any:  # fmt: skip
    """Give a module parameters and buffers in one of `messages.WAYS`, and return what is called then.

    ``given`` gets those that are put in the place of its own in each call; ``another`` makes a module as this one was
    made, or one that is kept, from other random numbers.
    """
    own = module.state_dict(keep_vars=True)
    if way == "cast":
        _cast(module)
    if way == "within":
        outer, prefix = within(module)
        outer.load_state_dict({prefix + name: value for name, value in values.items()}, False)
        return module
    if way == "beside":
        if (called := another(False)) is module:
            raise TypeError("there is one of it alone")
        called.load_state_dict(values, strict=False)  # it has no others in the place of those that it was made with
        another(True).load_state_dict({name: t + 1 if _real(t) else t for name, t in values.items()}, strict=False)
        return called
    if way in ("loaded", "cast", "assigned"):
        if way == "assigned":
            values = {name: value.clone().to(device) for name, value in values.items()}
        module.load_state_dict(values, strict=False, assign=way == "assigned")
        first: dict[int, str] = {}
        for name in own if way == "assigned" else ():  # two names of one parameter are tied again
            if (other := first.setdefault(id(own[name]), name)) != name:
                _put(module, name, module.state_dict(keep_vars=True)[other])
        return module
    called = module
    with torch.no_grad():
        if way == "moved":
            own_state = torch.nn.Module.parameters(module), torch.nn.Module.buffers(module)  # names may be in use
            for t in {id(t): t for some in own_state for t in some}.values():
                t.data = t.data.clone()
        states = [own]
        if way in ("copied first", "copied alone"):
            called = copy.deepcopy(module)
            states.append(called.state_dict(keep_vars=True))
            states = states[way == "copied alone" :]  # it may rely on the module, so that in general both get them
        others: dict[int, torch.Tensor] = {}  # two names of one parameter stay so
        for name, value in values.items():
            if way in ("in place", "moved", "copied", "copied first", "copied alone", "pickled"):
                for state in states:
                    state[name].data.copy_(value)  # no version counter counts it; trainers of large models do so
                continue
            fresh = torch.empty_like(own[name].data).copy_(value)
            if way == "data":
                own[name].data = fresh
            elif way == "called":
                apart = torch.stack((torch.zeros_like(fresh), fresh))[1].detach()  # behind what is none of it
                given[name] = others.setdefault(id(own[name]), apart).requires_grad_(own[name].requires_grad)
            else:
                if isinstance(own[name], torch.nn.Parameter):
                    fresh = torch.nn.Parameter(fresh, own[name].requires_grad)
                _put(module, name, others.setdefault(id(own[name]), fresh))
    if way == "copied":
        return copy.deepcopy(module)
    return pickle.loads(pickle.dumps(module)) if way == "pickled" else called


def within(module: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """Make a module a part of others, and return the outer one and the prefix of its names there."""
    prefix = ""
    for name in ("layers", "7", "mixer"):
        module, prefix = torch.nn.ModuleDict({name: module}), f"{name}.{prefix}"
    return module, prefix


def _cast(module: Any) -> None:
    """Cast a module to other dtypes and back; what that rounds gets its numbers back, and nothing else does."""
    for cast, other in ((module.double, torch.double), (module.bfloat16, torch.bfloat16), (module.half, torch.half)):
        before = {name: t.detach().clone() for name, t in _held(module) if t.is_floating_point()}
        (dtype,) = {t.dtype for t in before.values()}
        try:
            cast()
        finally:
            module.to(dtype)
        for name, t in _held(module):
            if (value := before.get(name)) is not None and torch.equal(t, value.to(other).to(dtype)):
                t.data.copy_(value)


def _held(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(torch.nn.Module.named_parameters(module), torch.nn.Module.named_buffers(module))


def _put(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Give a module another parameter or buffer of this name."""
    *path, last = name.split(".")
    setattr(module.get_submodule(".".join(path)), last, value)
