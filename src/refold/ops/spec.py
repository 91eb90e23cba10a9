"""The arguments and results of an operator, as data: one OpSpec drives dispatch, registration, tests and docs.

Axes are strings of the letters of `refold.axes`. Four spellings are special:

- ``*`` is any number of axes (``"b t *"``: batch, time, and any others);
- ``k`` is the number of sequences: of the pack if ``cu_seqlens`` is given, else the batch;
- ``w-1`` is one less than ``w``;
- in a spec with ``time_optional``, ``t`` may be absent, from all arguments at once.

Nothing here imports a framework. It sees arrays only as shape, dtype name and device name (`ArrayMeta`).
Design decision 14.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from refold.axes import AXES
from refold.errors import ArgumentError, DeviceError, DtypeError, ShapeError

FLOATS = ("float32", "bfloat16", "float16", "float64")
INTEGERS = ("int32", "int64")
BOOL = ("bool",)
CU_SEQLENS = "cu_seqlens"
MAY_BE_EMPTY = "b", "*"
"""Axes of a batch: where there is nothing in it, results are empty and gradients of parameters are zero."""

LARGEST_FLOAT = float(np.finfo(np.float64).max)
"""What stands for infinity in the node of a graph."""

LARGEST_INT = 2**63 - 1
"""What fits an integer of a torch.library schema."""

Sampler = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw test values of unit variance."""
    return rng.standard_normal(shape)


@dataclass(frozen=True)
class Arg:
    """An array argument: its alternative layouts, and how test cases fill it."""

    name: str
    axes: tuple[str, ...]
    optional: bool = False
    dtypes: tuple[str, ...] = FLOATS
    wide: bool = False
    """A parameter (decay rates, step bias, state) that stays float32 where activations are 16 bits wide."""
    sample: Sampler = normal

    @property
    def differentiable(self) -> bool:
        """Whether gradients flow to it."""
        return self.dtypes is FLOATS

    @property
    def timed(self) -> bool:
        """Whether it has a token for each of the sequence."""
        return "t" in self.axes[0].split()


@dataclass(frozen=True)
class Option:
    """An argument that is no array: its default, its type in a torch.library schema, what values it may have."""

    name: str
    default: Any
    schema: str
    check: Callable[[Any], bool] = lambda value: True
    expected: str = ""

    def plain(self, value: Any) -> Any:
        """Return NumPy's numbers as Python's, and other real numbers as floats where floats are meant."""
        if isinstance(value, np.generic):
            value = value.item()
        if self.schema in ("float", "float?"):
            return _as_float(value)
        if self.schema == "float[]" and isinstance(value, (tuple, list)):
            return tuple(map(_as_float, value))
        return value

    def written(self, value: Any) -> Any:
        """Return a value as the nodes of a graph hold it: infinities as `LARGEST_FLOAT`.

        Programs are saved as JSON, which has no infinity: PyTorch cannot load a package (AOTInductor) that holds one.
        """
        if self.schema == "float[]" and isinstance(value, (tuple, list)):
            return [LARGEST_FLOAT if v == math.inf else -LARGEST_FLOAT if v == -math.inf else v for v in value]
        return value

    def unwritten(self, value: Any) -> Any:
        """Return the value that a node holds as `written`."""
        if self.schema == "float[]" and isinstance(value, (tuple, list)):
            return tuple(math.inf if v == LARGEST_FLOAT else -math.inf if v == -LARGEST_FLOAT else v for v in value)
        return value

    def require(self, op: str, value: Any, name: str = "") -> None:
        """Raise the error that names the option, or what another signature calls it, if it cannot have a value."""
        if not self.check(value):
            raise ArgumentError(f"{op}: {name or self.name} must be {self.expected}; got {value!r}.")

    def read(self, op: str, value: Any, name: str = "") -> Any:
        """Return a value as `plain` does, once it is known that the option may have it."""
        plain = self.plain(value)
        self.require(op, plain, name)
        return plain


@dataclass(frozen=True)
class Output:
    """A result: its axes, and the option or rule that decides its dtype."""

    name: str
    axes: str
    like: str = "x"
    """Has the dtype of this argument; ``"state_dtype"`` means that option, else float32 (float64 of float64)."""
    alone: tuple[str, ...] = ()
    """Arguments that no other result depends on."""


@dataclass(frozen=True)
class Carry:
    """How the state after some tokens follows from the state before: a map of it, plus what comes out if it is zero.

    The map is the final state of a call of the operator itself: its ``inputs``, and what only the first result reads,
    are zeros, and its initial state is made of ones, or of the columns of the identity.
    """

    kind: str
    """``"factors"``: the map multiplies each element; ``"matrix"``: it multiplies from the left; ``"window"``: the
    state holds the last tokens, and they move by as many tokens as come."""
    inputs: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The axes that have other sizes in that call: no map depends on them."""
    forgets: str = ""
    """The argument that says where a state is forgotten, even one that is not finite."""


@dataclass(frozen=True, slots=True)
class ArrayMeta:
    """All that dispatch may know of an array."""

    shape: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True)
class Meta:
    """All that a backend's ``supports`` may ask: shapes, dtypes, devices and options, never values."""

    op: str
    framework: str
    arrays: Mapping[str, ArrayMeta]
    options: Mapping[str, Any]
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """Device kind of the first argument: ``cpu``, ``cuda``, ... (``jax`` under a JAX trace)."""
        return next(iter(self.arrays.values())).device

    @property
    def dtype(self) -> str:
        """Dtype name of the first argument."""
        return next(iter(self.arrays.values())).dtype


@dataclass(frozen=True)
class Example:
    """One generated test problem."""

    name: str
    sizes: Mapping[str, Any]
    given: frozenset[str] = frozenset()
    """The optional arguments that are passed."""
    options: Mapping[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    """Lengths of the packed sequences; empty for an ordinary batch."""
    layout: Mapping[str, int] = field(default_factory=dict)
    """Which alternative of ``Arg.axes`` to use, where not the first."""
    strided: bool = False
    """Pass views whose last axis is contiguous but whose other strides are not those of a fresh array."""

    def __str__(self) -> str:
        """Return the name: it becomes the test id."""
        return self.name


@dataclass(frozen=True)
class OpSpec:
    """One operator. Everything that is not an implementation."""

    name: str
    args: tuple[Arg, ...]
    options: tuple[Option, ...]
    outputs: tuple[Output, ...]
    cases: Callable[[], list[Example]]
    flops: Callable[[Mapping[str, Any]], int]
    """Floating-point operations of the sequential definition, from the sizes."""
    constraints: Callable[[Meta], Iterator[str]] = lambda meta: iter(())
    """Yields what is wrong beyond axes, dtypes, devices and options; usually nothing."""
    backends: tuple[str, ...] = ("triton", "numba", "torch", "jax", "reference")
    """Preference order."""
    folder: str = ""
    """The folder of its implementations, if not its own name (steps are in the folder of their scan)."""
    time_optional: bool = False
    updates: str = ""
    """The argument that the twin with a trailing underscore overwrites; empty if there is no such twin."""
    updates_strided: bool = False
    """Whether the twins of its backends take a state of any strides, as a transposed one; else it is contiguous."""
    splits: tuple[str, ...] = ()
    """Axes along which a call falls into independent calls: rows, and heads or channels (``g`` goes with the last)."""
    scans: str = ""
    """``"forward"`` if earlier tokens alone decide a result, so that a sequence may be cut anywhere."""
    carry: Callable[[Meta], Carry] | None = None
    """How a state passes through tokens, so that ranks may share a sequence (`refold.ops.torch.ranks`); or None."""
    form: str = ""
    """What it computes, as the compiler asks for it (`refold.compiler.ir.operators`); empty if no rewrite emits it."""
    narrowed: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """The arguments that must have 16 bits where the compiler lets it run in 16 bits, and those that may; or None."""
    complete: str = ""
    """The case with all optional arguments that registration is tested with."""
    layer: Example | None = None
    """A case of a layer's size, whose errors docs/numerics.md shows."""
    wide_sizes: Mapping[str, Any] = field(default_factory=dict)
    """Sizes that kernels with hand-made layouts take: on a GPU, each case runs with these, too."""

    @property
    def module(self) -> str:
        """Import path of the folder of implementations."""
        return f"refold.ops.{self.folder or self.name}"

    @property
    def public(self) -> Callable[..., Any]:
        """The function that users call."""
        return getattr(import_module(self.module), self.name)  # type: ignore[no-any-return]

    @property
    def updates_at(self) -> int:
        """Which of the arrays the twin that works in place overwrites."""
        return next(i for i, arg in enumerate(self.args) if arg.name == self.updates)

    def bytes_moved(self, meta: Meta) -> int:
        """Return the bytes that any implementation must at least read and write once."""
        read = sum(math.prod(a.shape) * _itemsize(a.dtype) for a in meta.arrays.values())
        return read + sum(math.prod(s) * _itemsize(d) for s, d in self.output_metas(meta))

    def output_metas(self, meta: Meta) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype name of each result."""
        metas = []
        for out in self.outputs:
            dtype = meta.arrays[out.like].dtype if out.like in meta.arrays else _state_dtype(meta)
            metas.append((shape_of(out.axes, meta.sizes), dtype))
        return metas

    def axes_of(self, arg: Arg, meta: Meta) -> str | None:
        """Return which of an argument's layouts its array has; None if its rank fits none of them."""
        rank = len(meta.arrays[arg.name].shape)
        return next((layout for layout in self.layouts(arg, meta) if _rank_fits(layout, rank)), None)

    def layouts(self, arg: Arg, meta: Meta) -> list[str]:
        """Return the layouts that an argument may have here: without time if ``x`` has none."""
        first = self.args[0]
        timeless = self.time_optional and len(meta.arrays[first.name].shape) == len(first.axes[0].split()) - 1
        return [layout.replace("t ", "") if timeless else layout for layout in arg.axes]

    def validate(self, meta: Meta) -> Meta:
        """Raise the error that names what is wrong, or return ``meta`` with its sizes filled in."""
        _check_present(self, meta)
        _check_dtypes_and_devices(self, meta)
        sizes = _read_sizes(self, meta)
        self.check_options([meta.options[option.name] for option in self.options])
        meta = Meta(meta.op, meta.framework, meta.arrays, meta.options, sizes)
        for complaint in self.constraints(meta):
            raise ShapeError(f"{self.name}: {complaint}")
        return meta

    def plain_options(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return options as `Option.plain` does; values are in their order."""
        return tuple(option.plain(value) for option, value in zip(self.options, values, strict=True))

    def written_options(self, values: Sequence[Any]) -> list[Any]:
        """Return options as `Option.written` does; values are in their order."""
        return [option.written(value) for option, value in zip(self.options, values, strict=True)]

    def unwritten_options(self, values: Sequence[Any]) -> list[Any]:
        """Return options as `Option.unwritten` does; values are in their order."""
        return [option.unwritten(value) for option, value in zip(self.options, values, strict=True)]

    def check_options(self, values: Sequence[Any]) -> None:
        """Raise the error that names the first option with a value it cannot have; values are in their order."""
        for option, value in zip(self.options, values, strict=True):
            option.require(self.name, value)


def step_of(scan: OpSpec, **own: Any) -> OpSpec:
    """Make the spec of a scan's step: one token, or a few, after a ``state``, which the twin overwrites.

    Args:
        scan: The scan.
        **own: What is the step's own: arguments, options, cases.
    """
    y, state = scan.outputs
    return OpSpec(
        f"{scan.name}_step", outputs=(y, replace(state, like="state")), flops=scan.flops, constraints=scan.constraints,
        folder=scan.name, time_optional=True, updates="state", splits=scan.splits, wide_sizes=scan.wide_sizes, **own,
    )  # fmt: skip


@cache
def operators() -> tuple[str, ...]:
    """List the folders of `refold.ops` that hold a spec."""
    folders = [Path(root) for root in sys.modules["refold.ops"].__path__]
    return tuple(sorted(spec.parent.name for folder in folders for spec in folder.glob("*/spec.py")))


@cache
def load(name: str) -> OpSpec:
    """Find the spec of an operator or of its step by its name, such as ``ssd`` or ``ssd_step``.

    Raises:
        ArgumentError: There is no such operator.
    """
    found = next((spec for spec in all_specs() if spec.name == name), None)
    if found is None:
        raise ArgumentError(f"refold.ops has no operator {name!r}; it has {', '.join(s.name for s in all_specs())}.")
    return found


def all_specs() -> list[OpSpec]:
    """List every operator and every step."""
    modules = [import_module(f"refold.ops.{folder}.spec") for folder in operators()]
    return [getattr(m, name) for m in modules for name in ("SPEC", "STEP") if hasattr(m, name)]


def shape_of(axes: str, sizes: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape that axes have, once sizes are known; axes without a size are left out."""
    shape: tuple[int, ...] = ()
    for letter in axes.split():
        if letter == "w-1":
            shape += (sizes["w"] - 1,)
        elif letter in sizes:
            shape += sizes[letter] if letter == "*" else (sizes[letter],)
    return shape


def letters_of(axes: str, sizes: Mapping[str, Any]) -> list[str]:
    """Return a letter for each axis that `shape_of` gives a size; those that ``*`` stands for are numbered."""
    letters: list[str] = []
    for letter in axes.split():
        if letter == "*":
            letters += [f"*{i}" for i in range(len(sizes["*"]))]
        elif letter == "w-1" or letter in sizes:
            letters.append(letter)
    return letters


def positive_int(value: Any) -> bool:
    """Whether an optional size is absent or a positive integer."""
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_INT)


def float_dtype(value: Any) -> bool:
    """Whether an optional dtype is absent or one that states may have."""
    return value is None or dtype_name(value) in FLOATS


def dtype_name(dtype: Any) -> str:
    """Return ``"float32"`` for torch.float32, numpy.dtype("float32"), jnp.float32 and ``"float32"``."""
    text = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return text.removeprefix("torch.")


def check_cu_seqlens_values(op: str, values: list[int], seqlen: int) -> None:
    """Check offsets whose values the host knows; see docs/operators.md for why those on a GPU are not read."""
    if values[0] != 0:
        raise ArgumentError(f"{op}: cu_seqlens must start with 0; got {values[0]}. Prepend a 0.")
    if values[-1] != seqlen:
        raise ArgumentError(f"{op}: cu_seqlens must end at t={seqlen}; got {values[-1]}. Make them cover all tokens.")
    for i, (start, end) in enumerate(pairwise(values)):
        if end < start:
            raise ArgumentError(f"{op}: cu_seqlens must not decrease; got {start} then {end} at {i}. Sort them.")


def _as_float(value: Any) -> Any:
    """Return a real number as a float, if it is in the range of floats; anything else as it is."""
    if type(value) is float or isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def _check_present(spec: OpSpec, meta: Meta) -> None:
    known = {arg.name for arg in spec.args}
    for arg in spec.args:
        if not arg.optional and arg.name not in meta.arrays:
            raise ArgumentError(f"{spec.name}: {arg.name} is required; got None. Pass an array.")
    assert known >= set(meta.arrays), f"{spec.name} has no arguments {set(meta.arrays) - known}"


def _check_dtypes_and_devices(spec: OpSpec, meta: Meta) -> None:
    first = spec.args[0].name
    for arg in spec.args:
        array = meta.arrays.get(arg.name)
        if array is None:
            continue
        if array.dtype not in arg.dtypes:
            raise DtypeError(
                f"{spec.name}: {arg.name} must be {' or '.join(arg.dtypes)}; got {array.dtype}. Convert {arg.name}."
            )
        if array.device != meta.arrays[first].device:
            raise DeviceError(
                f"{spec.name}: {arg.name} is on {array.device} but {first} is on {meta.arrays[first].device}. "
                f"Move {arg.name}."
            )


def _read_sizes(spec: OpSpec, meta: Meta) -> dict[str, Any]:
    """Match every argument's shape with its axes; the first argument that has an axis decides its size."""
    sizes: dict[str, Any] = {}
    owner: dict[str, str] = {}
    if (offsets := meta.arrays.get(CU_SEQLENS)) is not None:
        if len(offsets.shape) != 1 or offsets.shape[0] < 2:
            raise ShapeError(f"{spec.name}: cu_seqlens must be 1-D with k + 1 >= 2 entries; got {offsets.shape}.")
        sizes["k"], owner["k"] = offsets.shape[0] - 1, CU_SEQLENS
    for arg in spec.args:
        array = meta.arrays.get(arg.name)
        if array is None or arg.name == CU_SEQLENS:
            continue
        layout = spec.axes_of(arg, meta)
        if layout is None:
            expected = " or ".join(f"({', '.join(one.split())})" for one in spec.layouts(arg, meta))
            raise ShapeError(
                f"{spec.name}: {arg.name} must have the axes {expected}; got shape {tuple(array.shape)}"
                f"{_listing(sizes)}. Reshape {arg.name}."
            )
        _match(spec, arg, layout, array.shape, sizes, owner)
    if CU_SEQLENS in meta.arrays and sizes["b"] != 1:
        raise ShapeError(f"{spec.name}: with cu_seqlens the batch is 1; x has b={sizes['b']}. Concatenate along time.")
    if "b" in sizes:
        sizes.setdefault("k", sizes["b"])
    return sizes


def _rank_fits(layout: str, rank: int) -> bool:
    letters = layout.split()
    return rank >= len(letters) - 1 if "*" in letters else rank == len(letters)


def _match(
    spec: OpSpec, arg: Arg, layout: str, shape: tuple[int, ...], sizes: dict[str, Any], owner: dict[str, str]
) -> None:
    letters = layout.split()
    star = len(shape) - len(letters) + 1
    position = 0
    for letter in letters:
        size: Any = shape[position] if letter != "*" else tuple(shape[position : position + star])
        position += star if letter == "*" else 1
        # Without a pack there is one sequence a batch row: k is b, and the row count of x decides.
        known = letter if letter != "k" or "k" in sizes else "b"
        if known == "w-1":
            known, size = "w", size + 1
        if known not in sizes:
            sizes[known], owner[known] = size, arg.name
            for one in size if letter == "*" else (size,):
                if letter not in MAY_BE_EMPTY and one < 1:
                    raise ShapeError(
                        f"{spec.name}: axis {letter} ({AXES.get(letter, 'any')}) of {arg.name} is empty: {one} in "
                        f"{tuple(shape)}. Skip the call when there is nothing to compute."
                    )
        elif size != sizes[known]:
            raise ShapeError(
                f"{spec.name}: {arg.name} has {known}={size} but {owner[known]} has {known}={sizes[known]}"
                f"{_listing(sizes)}. Slice, pad or expand {arg.name}."
            )


def _listing(sizes: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{k}={v}' for k, v in sizes.items())})" if sizes else ""


def _state_dtype(meta: Meta) -> str:
    asked = meta.options.get("state_dtype")
    if asked is not None:
        return dtype_name(asked)
    return "float64" if meta.dtype == "float64" else "float32"


def _itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
