"""Profiles: which events count as kernels, and traces of several programs."""

import json

import pytest
import torch

from refold.errors import ArgumentError
from refold.verify.ceilings import ceilings
from refold.verify.profile import kernels, profiling, take

CPU = torch.device("cpu")


def layer(x):
    return (x.t().unsqueeze(0) @ x).relu().sum()


def test_operators_that_work_are_counted_and_views_are_not():
    x = torch.randn(16, 16)
    with profiling():
        found = {kernel["name"]: kernel["count"] for kernel in take("layer", lambda: layer(x), CPU)}
    assert found == {"aten::matmul": 1, "aten::relu": 1, "aten::sum": 1}


def test_nothing_is_profiled_unless_it_is_asked_for():
    def never():
        raise AssertionError

    assert take("never", never, CPU) == []


def test_a_trace_holds_all_programs_from_time_zero_on(tmp_path):
    x = torch.randn(16, 16)
    with profiling() as profiles:
        take("before", lambda: layer(x), CPU)
        take("after", lambda: x.relu(), CPU)
    profiles.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["after", "before"]
    spans = {e["name"]: e for e in events if e.get("cat") == "user_annotation"}
    assert spans["before"]["ts"] == spans["after"]["ts"] == 0
    relu = [names[e["pid"]] for e in events if e["name"] == "aten::relu"]
    assert sorted(relu) == ["after", "before"]


def test_an_empty_trace_is_refused(tmp_path):
    with profiling() as profiles:
        pass
    with pytest.raises(ArgumentError, match="nothing to write"):
        profiles.save(tmp_path / "trace.json")


def test_on_a_gpu_kernels_are_counted():
    events = [
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5, "tid": 1},
        *({"cat": "kernel", "name": "gemm", "ts": i, "dur": 1500, "tid": 7} for i in range(2)),
        {"cat": "gpu_memcpy", "name": "copy", "ts": 9, "dur": 1, "tid": 7},
    ]
    assert kernels(events) == [{"name": "gemm", "count": 2, "ms": 3.0}, {"name": "copy", "count": 1, "ms": 0.001}]


def test_ceilings_are_those_of_a_device_that_exists():
    found = ceilings(CPU, torch.float32)
    assert 1e8 < found["bytes_per_s"] < 1e13
    assert 1e8 < found["flops_per_s"] < 1e15
