"""Plans of the ssd forward for a Hopper GPU, and its Gluon kernels compiled for one; no GPU is needed."""

import re

import pytest

pytestmark = pytest.mark.rows(4)

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
_triton = pytest.importorskip("refold.ops.ssd._triton_forward")
pytest.importorskip("refold.ops.torch.tma_launch")

SHARED = 227 * 1024
"""Bytes that a program may take on compute capability 9.0. A multiprocessor has 1 KiB more, and a program costs one."""
OPTIONAL = ("D", "z", "dt_bias", "initial_state", "cu_seqlens", "chunk_size", "state_dtype")


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    """Plan on the CPU as if its tensors were on an H200."""

    def hopper(table, device, dtype):
        return table.default | table.dtypes.get(str(dtype).removeprefix("torch."), {}) | table.families["hopper"]

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where nothing is said.
    monkeypatch.setattr(_triton, "lookup", hopper)
    monkeypatch.setattr(_triton, "family", lambda device: "hopper")
    monkeypatch.setattr(_triton, "device_limits", lambda device: (132, SHARED - 2048))
    fits = _triton._fits_copy_engine
    monkeypatch.setattr(_triton, "_hopper_fits", lambda x, *others: x.element_size() == 2 and fits(x, *others))


def plan(b, t, h, p, g, n, dtype=torch.bfloat16, pad=0, **more):
    """Return a plan; rows of x, B and C begin ``pad`` elements late."""

    def draw(*shape):
        return torch.zeros(*shape[:-1], shape[-1] + pad, dtype=dtype)[..., pad:]

    x, B, C = draw(b, t, h, p), draw(b, t, g, n), draw(b, t, g, n)
    dt, A = torch.zeros(b, t, h, dtype=dtype), torch.zeros(h)
    if more.pop("z", False):
        more["z"] = torch.zeros(b, t, h, p, dtype=dtype)
    given = dict.fromkeys(OPTIONAL) | {"dt_softplus": True, "dt_limit": (0.0, float("inf"))} | more
    return _triton.ssd.make(x=x, dt=dt, A=A, B=B, C=C, **given)


def compiled(launch, pointers):
    """Compile the kernel of a launch for compute capability 9.0, with the tensors that ``pointers`` names."""
    runtime = pytest.importorskip("triton.experimental.gluon._runtime")
    from triton.backends.compiler import GPUTarget

    signature, constants = {}, {}
    views = iter(launch.views)
    for i, name in enumerate(launch.kernel.arg_names):
        if name.endswith("_desc"):
            view = next(views)
            if view:
                element = "fp32" if view["layout"].element_bitwidth == 32 else "bf16"
                signature[name] = f"tensordesc<{element}{list(view['block_shape'])},{view['layout']!r}>"
                continue
        elif name in launch.consts:
            signature[name], constants[i,] = "constexpr", launch.consts[name]
            continue
        elif not name.endswith("_ptr") or name in pointers:
            signature[name] = pointers.get(name, "i32")
            continue
        signature[name], constants[i,] = "constexpr", None
    source = runtime.GluonASTSource(launch.kernel, signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(launch.options))


FLOATS = dict.fromkeys(("decay_ptr", "shifted_ptr", "state_ptr", "total_ptr", "piece_state_ptr", "piece_decay_ptr",
                        "final_ptr", "D_ptr"), "*fp32")  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "more", "programs"),
    [
        ((1, 4096, 4, 64, 1, 128), {}, 1),
        ((1, 4096, 2, 80, 1, 256), {}, 1),
        ((1, 4096, 3, 64, 3, 48), {}, 2),
        ((1, 4096, 3, 64, 3, 48), {"dt_softplus": False, "dt_limit": (-float("inf"), 1.0)}, 2),
    ],
    ids=["two_tiles", "two_halves", "one_tile", "signs"],
)
def test_kernels_fit_a_hopper_gpu(shape, more, programs):
    """They compile, and as many programs fit on a multiprocessor as was planned."""
    b, _, h, p, _, n = shape
    made = plan(*shape, z=True, initial_state=torch.zeros(b, h, p, n), D=torch.zeros(h), **more)
    slots = made.tiles.slots(True)
    assert made.hopper
    assert made.scan.consts["OWN_CB"] == (shape[4] == h)
    assert made.scan.consts["SIGNED"] == bool(more)
    assert made.nsegments > 1
    assert slots[0] == programs
    pointers = FLOATS if made.initial_described else {**FLOATS, "initial_ptr": "*fp32"}
    for launch, fits in zip((made.scan, made.state), slots, strict=True):
        kernel = compiled(launch, pointers)
        assert kernel.metadata.shared <= SHARED
        assert fits * (kernel.metadata.shared + 1024) <= 228 * 1024
        registers = int(re.search(r"\.maxnreg (\d+)", kernel.asm["ptx"])[1])
        warps = int(re.search(r"\.reqntid (\d+)", kernel.asm["ptx"])[1]) // 32
        assert fits * registers * warps * 32 <= 65536


def test_tiles_cover_every_head_and_state():
    for headdim in range(8, 257, 8):
        for dstate in range(8, 257, 8):
            for heads, groups in ((1, 1), (3, 3), (3, 1), (8, 2), (12, 4), (80, 1)):
                tiles = _triton._Tiles.of(heads, groups, headdim, dstate)
                assert 0 <= tiles.blocks * tiles.channels - headdim < tiles.channels
                assert tiles.states * tiles.halves >= dstate
                assert tiles.states == 64 or dstate > 64 * tiles.halves
                in_group = heads // groups * tiles.blocks
                for each in (tiles.scan, tiles.state):
                    assert in_group % each == 0, "a program would reach into the next group"
                assert (tiles.scan, tiles.halves) in ((2, 1), (1, 2), (1, 1))
                assert tiles.state * tiles.halves in (1, 2, 4)


@pytest.mark.parametrize(
    ("shape", "more", "chunk"),
    [
        ((2, 777, 8, 64, 1, 128), {}, 64),
        ((2, 777, 8, 64, 2, 20), {}, 32),
        ((2, 777, 8, 64, 1, 128), {"pad": 1}, 32),
        ((1, 777, 8, 64, 1, 128), {"cu_seqlens": torch.tensor([0, 500, 777])}, 64),
        ((1, 777, 8, 64, 1, 256), {"cu_seqlens": torch.tensor([0, 500, 777])}, 32),
        ((2, 777, 8, 64, 1, 128), {"dtype": torch.float32}, 32),
        ((2, 777, 8, 64, 1, 16), {"dtype": torch.float32}, 16),
    ],
)
def test_chunks(shape, more, chunk):
    made = plan(*shape, **more)
    assert made.scan.consts["CHUNK"] == chunk
    assert made.hopper == (chunk == 64 and "cu_seqlens" not in more)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rows_that_the_copy_engine_cannot_read(axis):
    """Rows that are repeated, or that do not begin on 16 bytes, are left to the plain kernels."""
    fits = _triton._fits_copy_engine
    x, B = torch.zeros(2, 64, 4, 64, dtype=torch.bfloat16), torch.zeros(2, 64, 2, 128, dtype=torch.bfloat16)
    assert fits(x, B, B, None, None)
    sizes = [1 if i == axis else n for i, n in enumerate(B.shape)]
    repeated = torch.zeros(sizes, dtype=torch.bfloat16).expand(B.shape)
    assert not fits(x, B, repeated, None, None)
    strides = [n + 4 if i == axis else n for i, n in enumerate(B.stride())]
    odd = torch.zeros(1 << 17, dtype=torch.bfloat16).as_strided(B.shape, strides)
    assert not fits(x, odd, B, None, None)
    alone = odd.as_strided([1 if i == axis else n for i, n in enumerate(B.shape)], strides)
    assert fits(x, alone, alone, None, None)  # the stride of an axis of one element is never used
