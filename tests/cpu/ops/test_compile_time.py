"""What a first call costs: kernels that compile side by side, few variants of them, and few operations in them."""

import gc
import os
import re
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from refold.ops.backends import absence  # noqa: E402
from refold.ops.linear_scan import _triton as scan  # noqa: E402
from refold.ops.spec import load, operators  # noqa: E402
from refold.ops.testing.frameworks import frame_of  # noqa: E402
from refold.ops.testing.problems import problem  # noqa: E402
from refold.ops.torch import launch, triton_start  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)


class Device:
    """A device for which Triton compiles, and on which nothing can be launched."""

    def __init__(self):
        self.loaded = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            load_binary=lambda name, *known: (self.loaded.append((name, threading.current_thread())), 1, 0, 0, 1024),
        )

    def launcher_cls(self, src, metadata):
        return lambda *args: pytest.fail("nothing can be launched")

    def get_current_target(self):
        return HOPPER

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


@pytest.fixture
def compiled(monkeypatch):
    """The constants of the kernels that Triton began to compile, in order."""
    found = []
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **known: found.append(known["key"]))
    monkeypatch.setattr(driver, "_active", Device())
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where nothing is said.
    return found


def launches(kernel, *blocks):
    return [launch.Launch(kernel, (1,), {"BLOCK": block}, {}) for block in blocks]


@triton.jit
def _double_kernel(x_ptr, y_ptr, BLOCK: triton.language.constexpr):
    offs = triton.language.arange(0, BLOCK)
    triton.language.store(y_ptr + offs, 2 * triton.language.load(x_ptr + offs))


def test_kernels_of_a_plan_are_compiled_and_not_launched(compiled):
    first, second = launches(_double_kernel, 16, 32)
    x = torch.ones(32)

    def plan(x):
        y = torch.empty_like(x)
        first(0, x, y)
        second(0, x, y)
        return y.sum()

    launch.compile_together(plan, [x])
    assert len(compiled) == 2
    assert [name for name, thread in driver.active.loaded if thread is not threading.main_thread()] == [
        "_double_kernel", "_double_kernel",
    ]  # fmt: skip
    assert first.compiled is None
    for block in (16, 32):
        assert _double_kernel.warmup(x, x, BLOCK=block, grid=(1,)).asm["cubin"]
    assert len(compiled) == 2  # they were there


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _four_kernel(x_ptr, BLOCK: triton.language.constexpr):
    offs = triton.language.arange(0, BLOCK)
    triton.language.store(x_ptr + offs, _twice(_twice(triton.language.load(x_ptr + offs))))


@triton.jit
def _zero_kernel(x_ptr, BLOCK: triton.language.constexpr):
    triton.language.store(x_ptr + triton.language.arange(0, BLOCK), 0.0)


def test_kernels_are_read_one_at_a_time_the_longest_first(compiled, monkeypatch, tmp_path):
    """The launch of each is written meanwhile."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    read, own, written = [], triton.compiler.ASTSource.make_ir, []

    def reads(self, *known):
        read.append(self.name)
        time.sleep(0.05)
        found = own(self, *known)
        read.append(self.name)
        return found

    monkeypatch.setattr(triton.compiler.ASTSource, "make_ir", reads)
    monkeypatch.setattr(driver.active, "launcher_cls", lambda src, metadata: written.append(src.name), raising=False)
    kernels = [launches(kernel, 8)[0] for kernel in (_zero_kernel, _four_kernel, _double_kernel)]

    def plan(x):
        kernels[0](0, x)
        kernels[1](0, x)
        kernels[2](0, x, x)

    launch.compile_together(plan, [torch.ones(8)])
    assert read[::2] == read[1::2]
    assert read[0] == "_four_kernel"
    assert Counter(written) == dict.fromkeys({"_zero_kernel", "_four_kernel", "_double_kernel"}, 2)  # and in its load


def test_a_fork_waits_for_no_thread(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    found = triton_start.begin(lambda: calls.append(1) or len(calls))
    assert [found(), found()] == [1, 1]
    monkeypatch.setattr(triton_start.os, "getpid", lambda: -1)
    assert found() == 2  # computed there


def test_kernels_are_read_while_the_collector_works(compiled):
    """Python 3.11 has one count of how deep an `ast` is; the collector let another thread change it halfway."""

    class Garbage:
        def __init__(self):
            self.me = self

        def __del__(self):
            time.sleep(0)

    kernels = launches(_double_kernel, *(2**i for i in range(7, 12)))
    x, limits = torch.ones(2048), gc.get_threshold()
    gc.set_threshold(10)
    garbage = [Garbage() for _ in range(1000)]
    try:
        launch.compile_together(lambda x: [garbage.clear(), [kernel(0, x, x) for kernel in kernels]], [x])
    finally:
        gc.set_threshold(*limits)
    assert len(driver.active.loaded) == len(compiled) == 5


@triton.jit
def _wrong_kernel(x_ptr, BLOCK: triton.language.constexpr):
    triton.language.static_assert(BLOCK == 0, "never true")


def test_a_kernel_that_does_not_compile_fails_at_its_launch(compiled):
    (wrong,) = launches(_wrong_kernel, 16)
    x = torch.ones(16)
    launch.compile_together(lambda x: wrong(0, x), [x])
    with pytest.raises(triton.CompilationError, match="never true"):
        wrong(0, x)
    launch.compile_together(lambda x: wrong(0, x), [x])  # no mode of Triton's was left behind


def test_whoever_ends_a_compile_is_heard(compiled, monkeypatch):
    """Triton waits for each compile that began, and catches errors only."""

    def ends(*known):
        raise SystemExit("no more")

    (kernel,) = launches(_double_kernel, 4096)  # which no other test has loaded
    monkeypatch.setattr(driver.active.utils, "load_binary", ends)
    with pytest.raises(SystemExit, match="no more"):
        launch.compile_together(lambda x: kernel(0, x, x), [torch.ones(4096)])


def test_a_kernel_that_does_not_load_fails_at_its_launch(compiled, monkeypatch):
    def fails(*known):
        raise RuntimeError("CUDA error: out of memory")

    (kernel,) = launches(_double_kernel, 64)
    x = torch.ones(64)
    monkeypatch.setattr(driver.active.utils, "load_binary", fails)
    launch.compile_together(lambda x: kernel(0, x, x), [x])
    with pytest.raises(RuntimeError, match="out of memory"):
        kernel(0, x, x)


@pytest.fixture
def triton_at(monkeypatch, tmp_path):
    """A folder with two files, as if it were Triton's, whose hash is how often it was computed."""
    hashed, folder = [], tmp_path / "triton"
    (folder / "backends").mkdir(parents=True)
    for name in ("__init__.py", "backends/libtriton.so"):
        (folder / name).write_text("1")
    monkeypatch.setenv("REFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(triton, "__file__", str(folder / "__init__.py"))
    monkeypatch.setattr(
        triton_start.names, "triton_key", lambda: hashed.append(1) or f"{triton.__version__}-{len(hashed)}"
    )
    return folder


def in_a_new_process():
    own = triton_start.names.triton_key
    triton_start.remember()
    found = triton_start.names.triton_key()
    triton_start.names.triton_key = own
    return found.rpartition("-")[2]


def test_triton_hashes_its_files_once(triton_at):
    folder = triton_at
    assert [in_a_new_process(), in_a_new_process()] == ["1", "1"]
    library = folder / "backends" / "libtriton.so"
    was = library.stat()
    library.write_text("2")
    os.utime(library, ns=(was.st_atime_ns, was.st_mtime_ns + 1))  # as large
    assert [in_a_new_process(), in_a_new_process()] == ["2", "2"]
    library.write_text("22")
    os.utime(library, ns=(was.st_atime_ns, was.st_mtime_ns))  # as old
    assert [in_a_new_process(), in_a_new_process()] == ["3", "3"]
    (folder / "backends" / "new.py").write_text("")
    assert in_a_new_process() == "4"
    for kept in folder.parent.glob("cache/triton/*.key"):
        kept.write_text("half a")
    assert in_a_new_process() == "5"


@pytest.mark.parametrize("cache", ["off", "~nobody-of-this-name/cache", "/dev/null/cache"])
def test_triton_hashes_its_files_where_nothing_is_kept(triton_at, monkeypatch, cache):
    monkeypatch.setenv("REFOLD_CACHE", cache)
    assert [in_a_new_process(), in_a_new_process()] == ["1", "2"]


@pytest.mark.parametrize("version", ["3.10.0", "3.5.0"])
def test_an_untested_triton_hashes_its_files(triton_at, monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    assert [in_a_new_process(), in_a_new_process()] == ["1", "2"]
    monkeypatch.delattr(triton_start.names, "triton_key")
    triton_start.remember()
    assert not hasattr(triton_start.names, "triton_key")


def test_blocks_of_heads_share_their_kernels(compiled, monkeypatch):
    backward = pytest.importorskip("refold.ops.ssd._triton_backward")
    variants = set()

    def refuse(*, key, fn, **known):
        variants.add((fn.name.rpartition(".")[2], key))
        return True  # so nothing is compiled, nor launched

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", refuse)
    monkeypatch.setattr(launch.private, "raw_stream", lambda index: 0)
    b, t, h, p, n = 1, 32, 18, 16, 32
    x, B = torch.ones(b, t, h, p), torch.ones(b, t, 1, n)
    given = dict.fromkeys(("D", "z", "dt_bias", "initial_state", "cu_seqlens", "chunk_size", "state_dtype", "dstate"))
    given |= {"x": x, "dy": x, "dt": torch.ones(b, t, h), "A": -torch.ones(h), "B": B, "C": B, "needs": frozenset("x")}
    one_head = {"memory": 0, "block_n": 16}
    backward.ssd_backward(**given, dt_softplus=True, dt_limit=(0.0, 8.0), config=one_head)
    found = Counter(name for name, key in variants)
    # Those that walk over heads are two: for the first block of states, and for the others.
    assert {name: found[f"_ssd_bwd_{name}_kernel"] for name in ("states", "keys", "queries", "exact")} == {
        "states": 1, "keys": 2, "queries": 2, "exact": 2,
    }  # fmt: skip


def test_the_backward_of_a_scan_is_few_operations(compiled):
    """Triton's pass that chooses layouts takes time in proportion to the third power of their number.

    2037 operations, a load for each token, took twelve seconds, 891 take two.
    """
    kernel = scan._linear_scan_bwd_kernel
    kinds = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    consts = {"BLOCK": scan.BLOCK, "TOKENS": scan.TOKENS, "REVERSE": True, "cu_seqlens_ptr": None}
    kinds |= {"reset_ptr": "*i1", **dict.fromkeys(consts, "constexpr")}
    source = triton.compiler.ASTSource(kernel, kinds, consts)
    text = triton.compile(source, target=HOPPER, options={"num_warps": scan.WARPS}).asm["ttgir"]
    assert 20 <= text.count("tt.load") <= 30
    assert 500 < len(re.findall(r"^ +(?:%.* = )?\"?(?:tt|ttg|arith|scf|math)\.", text, re.MULTILINE)) < 1000
    assert "local_alloc" not in text  # each thread has all tokens of its channels


class Read(Exception):
    """Triton has read a kernel; the rest of its compile is left out."""


@pytest.mark.rows(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in operators() if absence(load(name), "triton") is None])
def test_triton_reads_every_kernel(compiled, monkeypatch, name, dtype):
    """The interpreter cannot show it: it runs Python, where both branches of an if may return what they like."""
    spec, through = load(name), launch.Launch._through_triton

    def read(*module):
        raise Read

    def stop(backend=None, stages=(), *known):
        if backend is None:
            return "read", "read"  # what the hook adds to the key of a kernel
        stages.update(dict.fromkeys(stages, read))
        return None

    def reads(self, args):
        with suppress(Read):
            through(self, args)

    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", stop)
    monkeypatch.setattr(launch, "compile_together", lambda *known: None)
    monkeypatch.setattr(launch, "compiling", SimpleNamespace(get=lambda: True))
    monkeypatch.setattr(launch.private, "raw_stream", lambda index: 0)
    monkeypatch.setattr(launch.Launch, "_through_triton", reads)
    module = import_module(f"{spec.module}._triton")
    for part in [part for key, part in sys.modules.items() if key.startswith(f"{spec.module}._triton")]:
        if hasattr(part, "INTERPRETED"):
            monkeypatch.setattr(part, "INTERPRETED", False)
    for case in [case for case in spec.cases() if case.name in (spec.complete, spec.cases()[0].name)]:
        given = problem(spec, case, dtype)
        arrays = {key: frame_of("triton").array(a, given.dtype_of(key)) for key, a in given.arrays.items()}
        arguments = {arg.name: arrays.get(arg.name) for arg in spec.args} | given.all_options()
        results = getattr(module, name)(**arguments)
        results = results if isinstance(results, tuple) else (results,)
        gradients = {f"d{out.name}": result for out, result in zip(spec.outputs, results, strict=True)}
        if backward := getattr(module, f"{name}_backward", None):
            backward(**gradients, **arguments, needs=frozenset(arrays))
    assert compiled
