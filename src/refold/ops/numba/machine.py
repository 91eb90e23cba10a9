"""Machine code that Numba made, run without Numba: a process that only loads it is spared half a second.

To import Numba and to load what it keeps takes 0.4 s, and leaves so many objects that Python's garbage collector looks
through the whole process once more. A kernel that allocates nothing and raises nothing needs none of that while it
runs. So the LLVM code that Numba made of it becomes an object file, which llvmlite links into a process in
milliseconds.

Numba's functions take where to write their result and an error; then, for each array, two pointers to its owner (none
here), the number of elements, the size of one in bytes, the address, the shape, and the strides in bytes; a truth value
is one byte. A few lines of LLVM code read all that from one row of numbers, because a call from Python with sixty
arguments takes 5 us.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import tempfile
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

NAME = "kernel"
CASTS = {"i64": "add i64 {}, 0", "ptr": "inttoptr i64 {} to ptr", "i8": "trunc i64 {} to i8"}
_DIGEST = hashlib.sha256().digest_size

Kinds = tuple[Any, ...]
"""Of each argument, its dtype and the number of axes; of a truth value, None."""


class NotApart(Exception):
    """A function needs Numba while it runs, or is not laid out as expected; the message says why."""


class Slot(NamedTuple):
    """The place of a contiguous tensor that each call brings."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def kinds_of(given: Sequence[Any]) -> Kinds:
    """Return what machine code depends on; arrays must be contiguous."""
    for x in given:
        assert isinstance(x, Slot | bool) or x.flags.c_contiguous, "kernels take contiguous arrays and truth values"
    return tuple([None if isinstance(x, bool) else (x.dtype, len(x.shape)) for x in given])


def named(kinds: Kinds) -> Kinds:
    """Return the same with NumPy's names of dtypes."""
    return tuple(kind and (str(kind[0]).removeprefix("torch."), kind[1]) for kind in kinds)


def machine() -> str:
    """Name all that machine code depends on besides the kernel: versions and the processor."""
    import llvmlite.binding as llvm

    return " ".join([version("numba"), version("llvmlite"), llvm.get_process_triple(), *_processor(llvm)])


def translated(function: Callable[..., None], options: dict[str, Any], kinds: Kinds) -> bytes:
    """Compile a function by Numba to an object file.

    Raises:
        NotApart: It needs Numba while it runs.
    """
    import llvmlite.binding as llvm
    import numba

    types = tuple(
        numba.types.boolean if kind is None else numba.types.Array(numba.from_dtype(np.dtype(kind[0])), kind[1], "C")
        for kind in named(kinds)
    )
    apart = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
    compiles: Any = numba.njit
    alone = compiles(**apart, **options)(function)
    try:
        alone.compile(types)
    except numba.core.errors.NumbaError as error:
        raise NotApart(str(error)) from error
    (made,) = alone.overloads.values()
    text, name = alone.inspect_llvm(types), made.fndesc.llvm_func_name
    module = llvm.parse_assembly(text)
    outside = [x.name for x in (*module.functions, *module.global_variables) if x.is_declaration]
    if unknown := [name for name in outside if not name.startswith("llvm.")]:
        raise NotApart(f"it uses {', '.join(unknown)}")
    takes = [str(x.type) for x in module.get_function(name).arguments]
    expected = ["ptr"] * 2
    for kind in kinds:
        expected += ["i8"] if kind is None else ["ptr", "ptr", "i64", "i64", "ptr", *["i64"] * (2 * kind[1])]
    if takes != expected:
        raise NotApart(f"it takes other arguments than expected: {', '.join(takes)}")
    return bytes(_target(llvm).emit_object(llvm.parse_assembly(text + _entry(name, takes[2:]))))


def _entry(name: str, takes: Sequence[str]) -> str:
    """Write the function that calls another one with the numbers in a row."""
    lines = [f"define i32 @{NAME}(ptr %row) {{", "%result = alloca ptr", "%error = alloca ptr"]
    for i, kind in enumerate(takes):
        lines += [f"%p{i} = getelementptr i64, ptr %row, i64 {i}", f"%n{i} = load i64, ptr %p{i}"]
        lines.append(f"%a{i} = {CASTS[kind].format(f'%n{i}')}")
    given = ", ".join(["ptr %result", "ptr %error", *(f"{kind} %a{i}" for i, kind in enumerate(takes))])
    return "\n".join([*lines, f'%status = call i32 @"{name}"({given})', "ret i32 %status", "}", ""])


def read(path: Path) -> bytes | None:
    """Return an object file that `write` kept; None if there is none, or if it is damaged."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    digest, code = kept[:_DIGEST], kept[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def write(path: Path, code: bytes) -> None:
    """Keep an object file; under its name there is always a whole one."""
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


class Code:
    """An object file that is linked into this process, to be called with arrays of certain kinds."""

    def __init__(self, code: bytes, kinds: Kinds) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target(llvm))
        self.engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self.engine.finalize_object()
        address = self.engine.get_function_address(NAME)
        if not address:
            raise NotApart("there is no function in it")
        self.function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(address)
        self.ends = list(accumulate((1 if kind is None else 5 + 2 * kind[1] for kind in kinds), initial=0))

    def prepared(self, given: Sequence[Any]) -> Callable[..., None]:
        """Return a call with tensors in place of the slots; other threads of Python may run meanwhile."""
        places = [end + 4 for end, x in zip(self.ends, given, strict=False) if isinstance(x, Slot)]
        # With the arrays: they stay where they are as long as someone has them.
        return partial(self._call, self._described(given), places, [x for x in given if isinstance(x, np.ndarray)])

    def _call(self, row: array[int], places: Sequence[int], _: Any, *tensors: torch.Tensor) -> None:
        own = row[:]
        for place, x in zip(places, tensors, strict=True):
            own[place] = x.data_ptr()
        status = self.function(own.buffer_info()[0])
        if status:
            raise RuntimeError(f"a kernel failed with status {status}")

    def _described(self, given: Sequence[Any]) -> array[int]:
        """Return the row of numbers, without the addresses of tensors."""
        row = array("q")
        for x in given:
            if isinstance(x, bool):
                row.append(x)
                continue
            size, address = (x.dtype.itemsize, 0) if isinstance(x, Slot) else (x.itemsize, x.ctypes.data)
            strides = list(accumulate(reversed(x.shape[1:]), mul, initial=size))[::-1] if x.shape else []
            row.extend([0, 0, math.prod(x.shape), size, address, *x.shape, *strides])
        return row


def _processor(llvm: Any) -> tuple[str, str]:
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _target(llvm: Any) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = _processor(llvm)
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )
