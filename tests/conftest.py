"""For all tests: no luck, no compile state carried from one test to the next, quick compilers, and what tests cost."""

import gc
import json
import os
import sys
import zlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.machine_code import keep_machine_code
from support.products import thin
from support.slow import exhaustive, mark_slow

# Each process of a parallel run has one thread: tests spend their time in compilers, which use one, and the threads of
# 15 processes on 16 cores wait for each other. Set before torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# XLA compiles each small test problem; without optimisation that takes a tenth of the time and rounds alike.
_CHEAP = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
# XLA ends the process at a flag it does not know, and later releases do not know this one.
if find_spec("jaxlib") and version("jaxlib").startswith("0.10."):
    _CHEAP.append("--xla_cpu_use_fusion_emitters=false")
# Inductor writes plain loops: vector instructions take it half as long again to write, and each new cache of its code
# first asks the C++ compiler for them. The second run of `make test` has them: an empty value lets Inductor choose.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Dynamo collects garbage after each compile, a tenth of its time; Python does it now and then.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# The compiler checks its graphs after every pass.
os.environ.setdefault("REFOLD_CHECK_GRAPHS", "1")
# A whole traceback for each operation that it is given takes a twentieth of the time.
os.environ.setdefault("JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS", "0")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_CHEAP]).strip()


# Compilers make many objects that stay: collecting at every 700 of them, as Python does, takes a tenth of the time.
gc.set_threshold(100_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def _what_is_old_stays():
    """Let later collections look at what is new alone: of all that compilers leave, one takes seconds."""
    gc.collect()
    gc.freeze()


# No test reads or writes the user's own decisions; tests of them name a folder of their own.
os.environ["REFOLD_CACHE"] = "off"


# The same examples in each run, and no limit on the time that one takes, which a busy machine decides.
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("steady")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Let tests with the mark ``rows`` run some of their rows; the others are exhaustive. Mark what is slow."""
    thin(items)
    mark_slow(items)


LIMIT = 10
"""Seconds of the processor that a test without the mark ``slow`` may take in its own process."""
BUSY = 1.5
"""Processes a processor at which a machine is too busy to refuse a test."""
FRAMEWORKS = 300
"""Who imports so many modules pays for a framework that later tests of the process find there."""
SECONDS: dict[str, float] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Refuse a long test by its processor time, which says too little where more runs than there are processors."""
    before, modules = os.times(), len(sys.modules)
    result = yield
    spent = sum(os.times()[:2]) - sum(before[:2])
    free = any(map(item.get_closest_marker, ("slow", "exhaustive")))
    free = free or os.environ.get("TRITON_INTERPRET") == "1"  # a child of a test, which counts as the test's
    quiet = os.getloadavg()[0] < BUSY * (os.cpu_count() or 1)
    if quiet and spent > LIMIT and len(sys.modules) - modules < FRAMEWORKS and not free:
        pytest.fail(f"it took {spent:.0f} s of the processor: make it shorter, or mark it slow", pytrace=False)
    return result


def pytest_runtest_logreport(report):
    if report.when == "call":
        SECONDS[report.nodeid] = report.duration


def pytest_terminal_summary(terminalreporter, config):
    """Say what did not run again."""
    if "passed" in config.option.markexpr and (left := exhaustive.passed()):
        line = f"{len(left)} slow tests passed before with exactly the files that they guard (tests/slow.json)"
        terminalreporter.write_line(line)


def pytest_sessionfinish(session):
    """Store the seconds of files, then of tests, the longest first, in ``build/durations.json``."""
    gc.unfreeze()
    if hasattr(session.config, "workerinput") or not SECONDS:
        return
    files: dict[str, float] = {}
    for test, seconds in SECONDS.items():
        files[test.partition("::")[0]] = files.get(test.partition("::")[0], 0.0) + seconds
    ordered = [dict(sorted(found.items(), key=lambda pair: -pair[1])) for found in (files, SECONDS)]
    build = Path(__file__).parents[1] / "build"
    build.mkdir(exist_ok=True)
    text = json.dumps([{name: round(s, 2) for name, s in found.items()} for found in ordered], indent=1)
    (build / "durations.json").write_text(text + "\n")


@pytest.fixture(autouse=True)
def _seed(request):
    """Seed every framework that is loaded from the test's own name."""
    seed = zlib.crc32(request.node.nodeid.encode())
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(seed)
    if guards := sys.modules.get("torch._dynamo.guards"):
        # Dynamo measures how long guards take, and empties the processor's caches before: 30 ms of each compile.
        guards.profile_guard_manager = lambda *_: 0.0
    keep_machine_code()
    yield
    if versions := sys.modules.get("refold.versions"):
        versions.forget()
    if "torch._dynamo" in sys.modules:
        import torch._dynamo

        torch._dynamo.reset()


@pytest.fixture
def without_code(request):
    """Let the graphs of `refold.compile` run operation by operation: code takes half of the time of a compile.

    For tests of what a graph becomes, and of its values. That fake values are true, which code relies on, is checked
    after every pass. There is code in tests marked ``codegen``, in those marked ``vectors`` where Inductor writes
    vector instructions, and in all of the group ``code`` (tools/exhaustive.py).
    """
    marks = ["codegen"] if os.environ["TORCHINDUCTOR_VEC_ISA_OK"] == "0" else ["codegen", "vectors"]
    if os.environ.get("REFOLD_TESTS_CODE") == "1" or any(map(request.node.get_closest_marker, marks)):
        yield
        return
    from support.trial import no_code

    with no_code():
        yield
