"""Names for programs and places, equal in every process in which the same decision would hold.

A program's name is a digest of the Dynamo graph: operations, constants, shapes, strides, dtypes, kinds of devices,
what needs a gradient, and the modes under which it was captured. A symbolic size counts as the power of two below it,
so that a graph for all lengths is decided once for lengths of a kind. A place is what measurements depend on besides:
versions, the source of refold, devices, threads.

What has no such name (an operator or a function of the user's own, whose code may be another one in the next process)
is not remembered.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..environment import processor
from ..ir.captured_loop import CapturedLoop
from ..ir.fx import concrete
from ..private import HigherOrderOperator, OpOverload, OpOverloadPacket, inductor_config, inductor_configuration

# Operators of these are PyTorch's or refold's own.
_NAMESPACES = ("_c10d_functional", "aten", "c10d_functional", "mkldnn", "prim", "prims", "quantized", "refold")
_MODULES = ("torch", "refold", "operator", "_operator", "math", "builtins")
# Operators of graphs that are in the graph. Others, such as kernels of the user's own, name code that is elsewhere.
_WITH_GRAPHS = (
    "associative_scan",
    "autograd_function_apply",
    "checkpoint",
    "cond",
    "flex_attention",
    "invoke_subgraph",
    "map",
    "scan",
    "tag_activation_checkpoint",
    "while_loop",
    "wrap",
)
# Passes of the user's own, of which Inductor's portable configuration says nothing.
_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)
# Constants of more bytes are not read to name a program.
_CONSTANT = 1 << 20


class Unnameable(Exception):
    """A program has no name that means the same in another process; the message says why."""


@dataclass(frozen=True)
class Key:
    """The names of one graph.

    Attributes:
        exact: Of this graph at these sizes.
        alike: Of all graphs from the same lines of the user's code whose sizes lie between the same powers of two.
    """

    exact: str
    alike: str


def digest(lines: Sequence[str]) -> str:
    """Return 24 hexadecimal digits for some text."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def name_program(gm: GraphModule, inputs: Sequence[Any], facts: Mapping[str, Any]) -> Key:
    """Name a Dynamo graph.

    Args:
        gm: The graph.
        inputs: The values it was captured with.
        facts: Options that a decision depends on, as JSON-compatible data.

    Raises:
        Unnameable: It has no such name.
    """
    modes = [*_modes(inputs), _options(facts)]
    values = [_value(x, _exact) for x in inputs]
    exact = [*modes, *values, *_aliases(inputs), *_graph(gm)]
    alike = [*modes, *(_value(x, _power) for x in inputs), *_lines(gm)]
    return Key(digest(exact), digest(alike))


def place(inputs: Sequence[Any]) -> str:
    """Name what a measurement depends on besides the program."""
    devices = {str(x.device) for x in inputs if isinstance(x, torch.Tensor)} | {"cpu"}
    names = sorted(_device(device) for device in devices)
    return digest([*versions(), *names, str(torch.get_num_threads())])


# Places ---------------------------------------------------------------------------------------


def _device(device: str) -> str:
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    return f"{processor()} {torch.backends.cpu.get_cpu_capability()}" if device == "cpu" else device.split(":")[0]


@functools.cache
def versions() -> list[str]:
    """List what a decision depends on wherever it is taken: Python, PyTorch, its compilers, refold's own source."""
    found = [platform.python_version(), torch.__version__, str(torch.version.cuda), str(torch.version.hip)]
    for name in ("triton", "numba"):
        try:
            found.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            found.append("")
    return [*found, _source()]


def _source() -> str:
    """Digest refold's own source: another version decides afresh."""
    root = Path(__file__).parents[2]
    hashed = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        hashed.update(str(path.relative_to(root)).encode())
        hashed.update(path.read_bytes())
    return hashed.hexdigest()


# Programs -------------------------------------------------------------------------------------


def _modes(inputs: Sequence[Any]) -> list[str]:
    kinds = sorted({x.device.type for x in inputs if isinstance(x, torch.Tensor)} | {"cpu"})
    autocast = [
        (kind, torch.get_autocast_dtype(kind)) for kind in kinds if kind != "meta" and torch.is_autocast_enabled(kind)
    ]
    settings: list[Any] = [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
    ]
    for name in _PASSES:
        if getattr(inductor_config, name, None) is not None:
            raise Unnameable(f"Inductor's configuration has a {name}")
    if (configuration := inductor_configuration()) is None:
        raise Unnameable("Inductor's configuration cannot be read")
    return [str(settings), configuration]


def _options(facts: Mapping[str, Any]) -> str:
    try:
        return json.dumps(facts, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise Unnameable(f"an option is not plain data: {error}") from None


def _exact(size: Any) -> str:
    return str(size) if isinstance(size, int) else f"{size}~{concrete(size).bit_length()}"


def _power(size: Any) -> str:
    return str(concrete(size).bit_length())


def _value(x: Any, size: Any) -> str:
    if isinstance(x, torch.Tensor):
        if type(x) not in (torch.Tensor, torch.nn.Parameter):
            raise Unnameable(f"an input is a {type(x).__name__}")
        if x.layout != torch.strided or x.is_quantized:
            raise Unnameable("an input is sparse or quantized")
        # Of another length the strides are others as well: what counts is their order.
        strides = x.stride()
        order = sorted(range(x.dim()), key=lambda d: (-concrete(strides[d]), d)) if size is _power else strides
        return f"{list(map(size, x.shape))} {list(order)} {x.dtype} {x.device.type} {x.requires_grad} {x.is_conj()}"
    return size(x) if isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool) else repr(x)


def _aliases(inputs: Sequence[Any]) -> list[str]:
    """Say which inputs share memory."""
    first: dict[int, int] = {}
    tensors = [(i, x) for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.layout == torch.strided]
    shared = [(i, first.setdefault(x.untyped_storage().data_ptr(), i)) for i, x in tensors if x.numel()]
    return [str([pair for pair in shared if pair[0] != pair[1]])]


def _graph(gm: GraphModule) -> Iterator[str]:
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        args = f"{_plain(node.args, position)} {_plain(node.kwargs, position)}"
        if node.op == "placeholder":
            yield f"placeholder {_symbolic(node)}"
        elif node.op == "get_attr":
            yield from _attribute(_fetch(gm, str(node.target)))
        elif node.op == "call_module":
            yield from _module(gm.get_submodule(str(node.target)))
            yield args
        else:
            yield f"{node.op} {_target(node.target)} {args}"


def _symbolic(node: Node) -> str:
    """Say which sizes of an input are symbolic."""
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor):
        return ""
    return str([[_exact(n) for n in sizes if not isinstance(n, int)] for sizes in (example.shape, example.stride())])


def _target(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload | OpOverloadPacket):
        if str(target).split(".")[0] not in _NAMESPACES:
            raise Unnameable(f"{target} is an operator of another package")
        return str(target)
    if isinstance(target, HigherOrderOperator):
        if not target.name().startswith(_WITH_GRAPHS):
            raise Unnameable(f"{target.name()} may call code that is not in the graph")
        return f"higher order {target.name()}"
    owner = getattr(target, "__objclass__", None)  # of a method
    module: Any = getattr(target, "__module__", None) or getattr(owner, "__module__", "")
    name: Any = getattr(target, "__qualname__", None) or getattr(target, "__name__", "")
    if not name or not module or module.split(".")[0] not in _MODULES:
        raise Unnameable(f"{name or target} is a function of another package")
    return f"{module}.{name}"


def _plain(x: Any, position: Mapping[Node, int]) -> str:
    """Write arguments with nodes by their number."""
    if isinstance(x, Node):
        return f"%{position[x]}"
    if isinstance(x, (list, tuple)):
        return f"({', '.join(_plain(v, position) for v in x)})"
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{k}: {_plain(v, position)}' for k, v in x.items())}}}"
    if isinstance(x, torch.device):
        return x.type  # each rank has its own index
    if isinstance(x, slice):
        return f"slice{_plain((x.start, x.stop, x.step), position)}"
    simple = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)
    if x is None or x is Ellipsis or isinstance(x, simple):
        return repr(x)
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(x)
    raise Unnameable(f"an argument is a {type(x).__name__}")


def _fetch(gm: GraphModule, target: str) -> Any:
    found: Any = gm
    for name in target.split("."):
        found = getattr(found, name)
    return found


def _attribute(found: Any) -> Iterator[str]:
    if isinstance(found, GraphModule):
        yield from _graph(found)
    elif type(found) is torch.Tensor and found.device.type == "cpu" and found.nbytes <= _CONSTANT:
        yield f"{_value(found, _exact)} {hashlib.sha256(_bytes(found)).hexdigest()}"
    else:
        raise Unnameable("it holds a constant that is large, on a device, or no tensor")


def _bytes(x: torch.Tensor) -> bytes:
    return bytes(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def _module(module: Any) -> Iterator[str]:
    if not isinstance(module, CapturedLoop):
        raise Unnameable(f"it calls a module of its own, {type(module).__name__}")
    yield f"{module.count} {(module.carried, module.lasts, module.reads)}"
    yield from _graph(module.body)


def _lines(gm: GraphModule) -> list[str]:
    """Return the lines of the user's code that a graph and its loops come from."""
    graphs = [gm, *(module.body for module in gm.modules() if isinstance(module, CapturedLoop))]
    return sorted({str(node.meta.get("stack_trace")) for graph in graphs for node in graph.graph.nodes})
