"""Operators on DTensors, in two processes: values and gradients, or an error with the remedy."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import refold.ops as ops
from refold.errors import ArgumentError
from refold.ops.spec import load
from support.ranks import on_ranks

R = Replicate()


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def problems():
    """Return per operator its arguments, and ways to place them by name."""
    b, t, h, p, g, n, d = 4, 9, 4, 3, 2, 5, 6
    ssd = {"x": draw(b, t, h, p), "dt": draw(b, t, h).abs(), "A": -draw(h).abs(), "B": draw(b, t, g, n)}
    ssd |= {"C": draw(b, t, g, n), "D": draw(h), "initial_state": draw(b, h, p, n)}
    one = ssd | {"B": draw(b, t, 1, n), "C": draw(b, t, 1, n)}
    rows = dict.fromkeys(("x", "dt", "B", "C", "initial_state"), Shard(0))
    heads = {"x": Shard(2), "dt": Shard(2), "A": Shard(0), "D": Shard(0), "initial_state": Shard(1)}
    groups = heads | {"B": Shard(2), "C": Shard(2)}
    selective = {"x": draw(b, t, d), "dt": draw(b, t, d).abs(), "A": -draw(d, n).abs(), "B": draw(b, t, n)}
    selective |= {"C": draw(b, t, n), "z": draw(b, t, d)}
    convolution = {"x": draw(b, t, d), "weight": draw(d, 3), "bias": draw(d), "initial_state": draw(b, d, 2)}
    norm = {"x": draw(b, t, d), "z": draw(b, t, d), "weight": draw(d)}
    step = {name: v if name in ("A", "D") else v[:, 0] for name, v in ssd.items() if name != "initial_state"}
    step |= {"state": ssd["initial_state"]}
    return [
        ("ssd", ssd, {}, [{}, rows, groups, {"x": Shard(0)}, heads]),
        ("ssd", one, {}, [heads, {"x": Shard(2)}]),
        ("ssd_step", step, {}, [{"x": Shard(0), "state": Shard(0)}, {"x": Shard(1), "state": Shard(1), "B": Shard(1)}]),
        ("selective_scan", selective, {}, [{}, {"x": Shard(0)}, {"x": Shard(2), "z": Shard(2), "A": Shard(0)}]),
        ("linear_scan", {"a": draw(b, t, 4, d), "x": draw(b, t, 4, d)}, {}, [{}, {"x": Shard(0)}, {"a": Shard(3)}]),
        ("causal_conv1d", convolution, {"activation": "silu"}, [{}, {"x": Shard(0)}, {"x": Shard(2)}]),
        ("gated_rmsnorm", norm, {"eps": 1e-5}, [{}, {"x": Shard(1)}]),
    ]  # fmt: skip


def check(name, arrays, options, placed, mesh):
    leaves = {n: a.clone().requires_grad_() for n, a in arrays.items()}
    expected = getattr(ops, name)(**leaves, **options)
    expected = expected if isinstance(expected, tuple) else (expected,)
    wanted = torch.autograd.grad(sum(y.sin().sum() for y in expected), list(leaves.values()))
    sharded = {n: distribute_tensor(a, mesh, [placed.get(n, R)]).requires_grad_() for n, a in arrays.items()}
    found = getattr(ops, name)(**sharded, **options)
    found = found if isinstance(found, tuple) else (found,)
    whole = [y.full_tensor() for y in found]
    gradients = torch.autograd.grad(sum(y.sin().sum() for y in whole), list(sharded.values()))
    for a, b in zip(whole, expected, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a.full_tensor(), b)


def run(rank, size):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    for name, arrays, options, ways in problems():
        for placed in ways:
            check(name, arrays, options, placed, mesh)
    _, ssd, _, _ = problems()[0]

    def refused(message, changed, name="ssd", given=ssd):
        placed = {n: distribute_tensor(a, mesh, [changed.get(n, R)]) for n, a in given.items()}
        with pytest.raises(ArgumentError, match=message):
            getattr(ops, name)(**placed | {n: a for n, a in changed.items() if isinstance(a, torch.Tensor)})

    refused(
        r"ssd: x is placed as .*Shard\(dim=1\).* sharded along b or h\. Redistribute it.*local_map", {"x": Shard(1)}
    )
    refused("of the mesh shards x along b and dt along h", {"x": Shard(0), "dt": Shard(2)})
    odd = {"x": draw(4, 9, 3, 3), "dt": draw(4, 9, 3), "A": draw(3), "B": draw(4, 9, 1, 2), "C": draw(4, 9, 1, 2)}
    refused("3 entries of axis h do not divide among 2 devices", {"x": Shard(2)}, given=odd)
    norm = {"x": draw(4, 6), "z": draw(4, 6), "weight": draw(6)}
    placed = {n: distribute_tensor(a, mesh, [Shard(a.ndim - 1)]) for n, a in norm.items()}
    with pytest.raises(ArgumentError, match=r"gated_rmsnorm: x is placed as .* sharded along \*"):
        ops.gated_rmsnorm(**placed, eps=1e-5)
    mixed = {n: distribute_tensor(a, mesh, [R]) for n, a in ssd.items()} | {"A": ssd["A"]}
    with pytest.raises(
        ArgumentError, match=r"ssd: A must be a DTensor as other arguments are; got a Tensor\. Distribute"
    ):
        ops.ssd(**mixed)
    # In place, on what each device holds.
    _, step, _, _ = problems()[2]
    state = distribute_tensor(step["state"], mesh, [Shard(0)])
    expected, after = ops.ssd_step(**step)
    rest = {n: distribute_tensor(a, mesh, [R]) for n, a in step.items() if n != "state"}
    with torch.no_grad():
        y, state = ops.ssd_step_(**rest, state=state)
    torch.testing.assert_close(y.full_tensor(), expected)
    torch.testing.assert_close(state.full_tensor(), after)


@pytest.mark.exhaustive
def test_two_processes(tmp_path):
    on_ranks(2, run, tmp_path)


def test_every_operator_says_where_it_may_be_cut():
    for name in ("ssd", "selective_scan", "linear_scan", "causal_conv1d"):
        assert load(name).splits[0] == "b"
        assert len(load(name).splits) == 2
