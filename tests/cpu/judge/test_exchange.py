"""Definitions and solutions of FlashInfer-Bench: read, judged, and written as traces; and the marker for pytest."""

import copy
import functools
import itertools
import json
import operator
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from refold.errors import ArgumentError, TargetError
from refold.judge import Nursery, exchange, judge_solution

REFERENCE = """
import torch

def run(x, weight, eps):
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
"""
DEFINITION = {
    "name": "rmsnorm_h64",
    "op_type": "rmsnorm",
    "axes": {"batch": {"type": "var"}, "twice": {"type": "var"}, "hidden": {"type": "const", "value": 64}},
    "constraints": ["twice == batch * 2", "batch < 40"],
    "inputs": {
        "x": {"shape": ["twice", "hidden"], "dtype": "bfloat16"},
        "weight": {"shape": ["hidden"], "dtype": "bfloat16"},
        "eps": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"y": {"shape": ["twice", "hidden"], "dtype": "bfloat16"}},
    "reference": REFERENCE,
}
RIGHT = """
import torch

def fast(x, weight, eps):
    return (torch.nn.functional.rms_norm(x.float(), (64,), None, eps) * weight.float()).to(x.dtype)
"""
PLACED = RIGHT.replace("eps):", "eps, y):").replace("return (", "y.copy_((").replace("(x.dtype)", "(x.dtype))")
FILES = {
    "main.py": "from kernels.norm import fast as other\n\ndef fast(*values):\n    return other(*values)\n",
    "kernels/norm.py": RIGHT,
    "kernels/__init__.py": "",
}


def _solution(*, sources=None, **spec):
    sources = sources or {"main.py": RIGHT}
    return {
        "name": "fast_rmsnorm",
        "definition": "rmsnorm_h64",
        "author": "somebody",
        "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": "main.py::fast"} | spec,
        "sources": [{"path": path, "content": text} for path, text in sources.items()],
    }


@pytest.fixture(scope="module")
def nursery():
    with Nursery(threads=1) as nursery:
        yield nursery


def _files(folder, solution, definition=DEFINITION):
    paths = folder / "definition.json", folder / "solution.json"
    for path, data in zip(paths, (definition, solution), strict=True):
        path.write_text(json.dumps(data))
    return paths


@pytest.mark.rows(6)
@pytest.mark.parametrize(
    ("solution", "status"),
    [
        (_solution(), "PASSED"),
        (_solution(sources={"main.py": PLACED}, destination_passing_style=True), "PASSED"),
        (_solution(sources={"main.py": PLACED}), "PASSED"),
        (_solution(sources=FILES), "PASSED"),
        (_solution(sources={"main.py": RIGHT.replace("eps):", "eps, block=64):")}), "PASSED"),
        (_solution(sources={"main.py": RIGHT.replace("None, eps)", "None, 1.0)")}), "INCORRECT_NUMERICAL"),
        (_solution(sources={"main.py": RIGHT.replace(".to(x.dtype)", "")}), "INCORRECT_DTYPE"),
        (_solution(sources={"main.py": RIGHT.replace("return", "raise ValueError\n    return")}), "RUNTIME_ERROR"),
    ],
)
def test_a_solution_is_judged_and_traced(solution, status, nursery, tmp_path):
    found = list(judge_solution(*_files(tmp_path, solution), nursery=nursery, level="quick", accept="right", threads=1))
    verdict, trace = found[-1]
    assert trace["evaluation"]["status"] == status, str(verdict)
    assert trace["definition"] == "rmsnorm_h64"
    assert trace["workload"]["axes"]["twice"] == 2 * trace["workload"]["axes"]["batch"]
    assert len(found) == (2 if verdict.accepted else 1)
    assert (trace["evaluation"]["correctness"] is not None) == (status in ("PASSED", "INCORRECT_NUMERICAL"))
    json.dumps(trace)


def test_a_solution_for_one_workload_alone_is_found_out(nursery, tmp_path):
    special = RIGHT.replace("    return", "    if len(x) != 8:\n        return x\n    return")
    files = _files(tmp_path, _solution(sources={"main.py": special}))
    workload = {"axes": {"batch": 4, "twice": 8}, "inputs": {"x": {"type": "random"}}, "uuid": "one"}
    lines = [{"workload": workload}, {"workload": {**workload, "axes": {"batch": 3, "twice": 6}, "uuid": "two"}}]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"nursery": nursery, "level": "quick", "accept": "right", "threads": 1}
    found = list(judge_solution(*files, tmp_path / "w.jsonl", **options))
    assert [trace["workload"]["uuid"] for _, trace in found] == ["one"]
    assert [verdict.outcome for verdict, _ in found] == ["refused"]
    assert list(judge_solution(*files, **options))[-1][0].outcome == "refused"


def test_a_solution_that_ignores_a_whole_number_is_found_out(nursery, tmp_path):
    definition = DEFINITION | {
        "inputs": DEFINITION["inputs"] | {"eps": {"shape": None, "dtype": "int32"}},
        "reference": "def run(x, weight, eps):\n    return x * eps",
    }
    options = {"nursery": nursery, "level": "quick", "accept": "right", "threads": 1}
    for result, outcomes in (("x * eps", ["accepted"] * 2), ("x.clone()", ["refused"])):
        solution = _solution(sources={"main.py": f"def fast(x, weight, eps):\n    return {result}"})
        found = judge_solution(*_files(tmp_path, solution, definition), **options)
        assert [verdict.outcome for verdict, _ in found] == outcomes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axes": {"batch": {"type": "const", "value": 0}}}, "axis batch must be"),
        ({"inputs": {"x": {"shape": ["batch"], "dtype": "float4"}}}, "x must have a dtype"),
        ({"inputs": {"x": {"shape": ["length"], "dtype": "float32"}}}, "the shape of x"),
        ({"reference": ""}, "reference must be"),
        ({"constraints": ["x[0] == 3"]}, "not one of sizes alone"),
        ({"constraints": ["batch > 1000"]}, "no sizes satisfy"),
        ({"constraints": ["__import__('os')"]}, "not one of sizes alone"),
    ],
)
def test_a_definition_that_is_none(change, message, tmp_path):
    path, _ = _files(tmp_path, _solution(), DEFINITION | change)
    with pytest.raises(TargetError, match=message):
        exchange.Definition.read(path).drawn(0)


@pytest.mark.parametrize(
    ("solution", "message"),
    [
        (_solution(language="cuda"), "python and triton can be judged"),
        (_solution(entry_point="main.py"), "entry_point must be"),
        (_solution(sources={"../main.py": ""}), "outside of its folder"),
        (_solution() | {"sources": []}, "sources must be a list"),
        (_solution() | {"sources": [{"path": "main.py", "content": text} for text in (RIGHT, "")]}, "is there twice"),
        (_solution() | {"definition": "other"}, "solves other, not rmsnorm_h64"),
    ],
)
def test_a_solution_that_is_none(solution, message, tmp_path):
    with pytest.raises(TargetError, match=message):
        list(judge_solution(*_files(tmp_path, solution)))


VALUES = [
    None,
    True,
    -1,
    1 << 70,
    float("nan"),
    "\ud800",
    "a\0b",
    [],
    [[]],
    {"a": 1},
    "1+" * 3000 + "1",
    "batch in [1]",
]
WORKLOAD = {"axes": {"batch": 4, "twice": 8}, "inputs": {"x": {"type": "random"}}, "uuid": "one"}


def _places(data, path=()):
    yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from _places(value, (*path, key))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_whatever_stands_in_a_file_is_read_or_refused(at, tmp_path):
    files = [tmp_path / name for name in ("definition.json", "solution.json", "workload.jsonl")]
    refused = 0
    for path, value in itertools.product(_places([DEFINITION, _solution(), WORKLOAD][at]), VALUES):
        data = copy.deepcopy([DEFINITION, _solution(), WORKLOAD])
        owner = functools.reduce(operator.getitem, (at, *path)[:-1], data)
        owner[(at, *path)[-1]] = value
        for file, each in zip(files, data, strict=True):
            file.write_text(f"\ufeff{json.dumps(each)}")
        try:
            what, how = exchange.Definition.read(files[0]), exchange.Solution.read(files[1])
            what.drawn(0)
            exchange.programs(what, how, *exchange.Workload.read(files[2]), tmp_path)
        except TargetError:
            refused += 1
    assert refused > 50


def test_a_name_that_stands_twice(tmp_path):
    path = tmp_path / "solution.json"
    path.write_text(json.dumps(_solution()).replace('"author"', '"name": "another", "author"'))
    with pytest.raises(TargetError, match="stands twice"):
        exchange.Solution.read(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1 << 70])
def test_numbers_that_json_can_hold_end_in_a_verdict(value, nursery, tmp_path):
    inputs = {"eps": {"type": "scalar", "value": value}}
    (tmp_path / "w.jsonl").write_text(json.dumps(WORKLOAD | {"inputs": inputs}))
    options = {"nursery": nursery, "level": "quick", "accept": "right", "threads": 1}
    ((verdict, trace),) = judge_solution(*_files(tmp_path, _solution()), tmp_path / "w.jsonl", **options)
    assert verdict.outcome in ("accepted", "unjudged"), str(verdict)
    json.dumps(trace)


@pytest.mark.parametrize(("factor", "outcome"), [("eps", "accepted"), ("0.5", "refused")])
def test_a_file_holds_tensors_and_the_workload_a_number(factor, outcome, nursery, tmp_path):
    save_file({"t": torch.randn(64)}, tmp_path / "a")
    inputs = {"weight": {"type": "safetensors", "path": "a", "tensor_key": "t"}, "eps": {"type": "scalar", "value": 2}}
    (tmp_path / "w.jsonl").write_text(json.dumps(WORKLOAD | {"inputs": inputs}))
    x = {"shape": ["twice", "hidden"], "dtype": "float8_e4m3fn"}
    definition = DEFINITION | {
        "inputs": {**DEFINITION["inputs"], "x": x},
        "reference": "def run(x, weight, eps):\n    return x.to(weight) * weight * eps",
    }  # fmt: skip
    solution = _solution(
        sources={"main.py": f"def fast(x, weight, eps):\n    return {factor} * (x.to(weight) * weight)"}
    )
    options = {"nursery": nursery, "level": "quick", "accept": "right", "threads": 1}
    ((verdict, _),) = judge_solution(*_files(tmp_path, solution, definition), tmp_path / "w.jsonl", **options)
    assert verdict.outcome == outcome, str(verdict)


def test_tensors_that_no_memory_holds(tmp_path):
    axes = {"batch": 1 << 30, "twice": (1 << 31) - 1}
    inputs = {"x": {"type": "random"}, "weight": {"type": "safetensors", "path": "a", "tensor_key": "b"}}
    (tmp_path / "w.jsonl").write_text(json.dumps(WORKLOAD | {"axes": axes, "inputs": inputs}))
    definition = DEFINITION | {"inputs": {name: DEFINITION["inputs"][name] for name in ("x", "weight")}}
    definition["inputs"]["x"] = {"shape": ["twice", "twice", "twice"], "dtype": "bfloat16"}
    with pytest.raises(TargetError):
        list(judge_solution(*_files(tmp_path, _solution(), definition), tmp_path / "w.jsonl"))


@pytest.mark.parametrize("given", [{"path": "/etc/passwd"}, {"path": "a\0b"}, {"path": "."}, {"tensor_key": ["x"]}, {}])
def test_inputs_in_files_that_are_none(given, tmp_path):
    (tmp_path / "w.jsonl").write_text(json.dumps(WORKLOAD | {"inputs": {"x": {"type": "safetensors"} | given}}))
    files = _files(tmp_path, _solution())
    with pytest.raises(TargetError):
        list(judge_solution(*files, tmp_path / "w.jsonl"))


def test_json_goes_with_json():
    with pytest.raises(ArgumentError, match="goes with a solution"):
        exchange.is_exchange("definition.json", "fast.py")


@pytest.mark.slow
def test_a_marked_test_passes_only_if_the_candidate_is_accepted(tmp_path):
    layer = "import torch\n\nclass {}(torch.nn.Module):\n    def forward(self, x):\n        return {}\n"
    inputs = "\ndef get_inputs():\n    return [torch.randn(4, 8)]\n"
    (tmp_path / "layer.py").write_text(layer.format("Model", "x * 2") + inputs)
    (tmp_path / "fast.py").write_text(layer.format("ModelNew", "x + x"))
    (tmp_path / "wrong.py").write_text(layer.format("ModelNew", "x * 2.1"))
    mark = '@pytest.mark.refold_verify(original="layer.py", candidate="{}.py", level="quick", accept="right")\n'
    tests = [
        "import pytest\n",
        mark.format("fast"),
        "def test_fast(refold_verdict):\n    assert refold_verdict.accepted\n",
    ]
    tests += [mark.format("wrong"), "def test_wrong():\n    pass\n"]
    (tmp_path / "test_layer.py").write_text("".join(tests))
    command = [sys.executable, "-m", "pytest", "--strict-markers", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "1 passed, 1 error" in done.stdout, done.stdout
    assert "refused by N1" in done.stdout
