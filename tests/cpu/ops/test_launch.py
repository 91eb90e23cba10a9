"""Direct kernel launches, which fall back to Triton's own launch on any failure."""

from types import SimpleNamespace

import pytest

from refold.errors import RefoldWarning

launch = pytest.importorskip("refold.ops.torch.launch")
tma_launch = pytest.importorskip("refold.ops.torch.tma_launch")


class Kernel:
    """A kernel whose launches are written down; ``run`` is what a compiled kernel does when it is launched directly."""

    def __init__(self, run=None, metadata=None):
        self.params = [SimpleNamespace(name=name) for name in ("x", "n", "BLOCK")]
        self.launches = []
        self.compiled = SimpleNamespace(
            run=run or (lambda *args: self.launches.append(("direct", *args[9:]))),
            function=1,
            packed_metadata=(4, 1, 0),
            metadata=metadata or SimpleNamespace(),
            src=SimpleNamespace(signature={}),
        )

    def __getitem__(self, grid):
        def through_triton(*args, **consts):
            self.launches.append(("triton", *args, *(consts[k] for k in ("BLOCK",))))
            return self.compiled

        return through_triton


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    launch._directly.cache_clear()
    yield
    launch._directly.cache_clear()


def made(kernel):
    return launch.Launch(kernel, (8,), {"BLOCK": 64}, {})


def test_the_first_launch_compiles_and_later_ones_are_direct():
    kernel = Kernel()
    run = made(kernel)
    assert not run.takes_addresses
    run(0, "x", 5)
    assert not run.takes_addresses  # no direct launch has worked yet
    run(0, "x", 5)
    assert run.takes_addresses
    run(0, 4096, 5)
    assert kernel.launches == [("triton", "x", 5, 64), ("direct", "x", 5, 64), ("direct", 4096, 5, 64)]


@pytest.mark.parametrize("error", [TypeError("takes 10 arguments"), AttributeError("no launch_enter_hook")])
def test_a_direct_launch_that_fails_is_triton_s_from_then_on(error):
    def run(*args):
        raise error

    kernel = Kernel(run)
    starts = made(kernel)
    starts(0, "x", 5)
    with pytest.warns(RefoldWarning, match="a direct launch failed") as caught:
        starts(0, "x", 6)
    starts(0, "x", 7)
    assert len(caught) == 1
    assert not starts.takes_addresses
    assert kernel.launches == [("triton", "x", n, 64) for n in (5, 6, 7)]


def test_a_kernel_s_own_failure_is_raised():
    def run(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    starts = made(Kernel(run))
    starts(0, "x", 5)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        starts(0, "x", 5)


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0+git"])
def test_another_triton_is_not_gone_around(monkeypatch, version):
    monkeypatch.setattr(launch.triton, "__version__", version)
    kernel = Kernel()
    first, second = made(kernel), made(kernel)
    with pytest.warns(RefoldWarning, match="was not tested"):
        first(0, "x", 5)
    for starts in (first, second, second):  # warnings are errors: it is said once
        starts(0, "x", 5)
    assert kernel.launches == [("triton", "x", 5, 64)] * 4


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        (SimpleNamespace(), "cannot be kept"),  # as after a renaming
        (SimpleNamespace(global_scratch_size=128, tensordesc_meta=[]), "scratch memory"),
        (SimpleNamespace(profile_scratch_size=8, tensordesc_meta=[]), "scratch memory"),
    ],
)
def test_parameters_that_cannot_be_laid_out_are_triton_s(metadata, why):
    kernel = Kernel(metadata=metadata)
    starts = tma_launch.MappedLaunch(kernel, (8,), {"BLOCK": 64}, {}, views=[{}])
    with pytest.warns(RefoldWarning, match=why):
        starts(0, None, 5)
    starts(0, None, 5)
    assert not starts.takes_addresses
    assert kernel.launches == [("triton", None, 5, 64), ("direct", None, 5, 64)]


def test_a_thread_without_a_context_gets_one(monkeypatch):
    """As one that autograd starts, in which a kernel that reads through the copy engine is the first."""
    asked = []

    def ask(name):
        return lambda *args: asked.append(name) or 0

    names = ("cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent")
    monkeypatch.setattr(tma_launch, "_driver", lambda: SimpleNamespace(**{name: ask(name) for name in names}))
    monkeypatch.setattr(tma_launch, "_here", SimpleNamespace())
    monkeypatch.setattr(tma_launch.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(tma_launch.torch.cuda, "current_device", lambda: 0)
    starts = tma_launch.MappedLaunch(Kernel(), (8,), {"BLOCK": 64}, {}, views=[{}])
    with pytest.warns(RefoldWarning):
        starts(0, None, 5)
    starts(0, None, 5)
    assert asked == list(names)


def test_kernels_in_gluon_that_cannot_be_imported_are_a_warning():
    launch.gluon.cache_clear()
    with pytest.warns(RefoldWarning, match="plain Triton kernels run"):
        assert launch.gluon("refold.ops.ssd._no_kernels") is None
    assert launch.gluon("refold.ops.ssd._no_kernels") is None  # warnings are errors: it is said once
    launch.gluon.cache_clear()
