"""Lean models whose heads are cut over ranks: logits, gradients and generated tokens equal one device's."""

import dataclasses
from functools import partial

import pytest
import torch
from torch.distributed import all_reduce, new_group
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves, tree_leaves_with_path, tree_map

from refold.errors import ArgumentError
from refold.generate.sampling import Sampling
from refold.generate.torch import Generator
from refold.models.checkpoint import random_params
from refold.models.torch import heads, model_for, take_layers_apart, to_device
from refold.models.torch.heads import shard_heads
from refold.parallel import Cut
from support.models import GRANITE, MAMBA, MAMBA2, QWEN
from support.ranks import on_ranks, once

BOUND = 1e-6
"""States and sampling are float32."""


def configs():
    """Yield models: with groups that several ranks read, or parts of them, and norms that span ranks or do not."""

    def mixer(of, **changed):
        return dataclasses.replace(of, mixer=dataclasses.replace(of.mixer, nheads=6, **changed))

    yield "channels", dataclasses.replace(MAMBA, d_inner=96, proj_bias=True, selection_eps=1e-5)
    yield "norms of groups", mixer(MAMBA2, ngroups=3, norm_groups=6, proj_bias=True)
    yield "a group of all heads", mixer(MAMBA2, ngroups=1)
    experts = {"nexperts": 4, "expert_dim": 16, "experts_per_token": 2}
    yield "granite", dataclasses.replace(mixer(GRANITE), nheads=6, shared_dim=36, rope_theta=1e4, **experts)
    yield (
        "bamba",
        dataclasses.replace(mixer(GRANITE), layout="bamba", attention_bias=True, mlp_bias=True, shared_dim=36),
    )
    yield "qwen", dataclasses.replace(mixer(QWEN), nheads=6)


def trained(config, params, ids, at, cut=None):
    """Return logits of the tokens of some places, and leave gradients in parameters."""
    tree_map(torch.Tensor.requires_grad_, params)
    logits, _ = model_for(config).forward(config, params, ids[:, at], kind="all", group=cut)
    (logits.square() * (1 + at[:, None])).sum().backward()
    return logits.detach()


def differences(config, group, time=None):
    """Return the differences of a rank from one device; ``time`` cuts the tokens over other ranks."""
    params = to_device(random_params(config))
    single, params = take_layers_apart(params), take_layers_apart(tree_map(torch.Tensor.double, params))
    own_config, own = shard_heads(config, params, group)
    own = tree_map(lambda a: a.detach().clone(), own)  # what is not cut has gradients of its own, too
    ids = torch.randint(config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    every = torch.arange(9)
    places = every if time is None else time.positions()
    logits = trained(own_config, own, ids, places, time)

    def on_one_device():
        return trained(config, params, ids, every), tree_map(lambda a: a.grad, params)

    expected, gradients = once(group, on_one_device)
    for a in tree_leaves(own) if time is not None else ():
        all_reduce(a.grad, group=time.group)
    wanted = shard_heads(config, gradients, group)[1]
    pairs = [("logits", logits, expected[:, places])]
    pairs += [
        (str(path), a.grad, w) for (path, a), (_, w) in zip(*map(tree_leaves_with_path, (own, wanted)), strict=True)
    ]
    least = 1e-3 * max(float(w.abs().max()) for _, _, w in pairs[1:])
    wrong = [
        f"{n} {float((a - w).abs().max()):.0e}"
        for n, a, w in pairs
        if not float((a - w).abs().max()) <= BOUND * max(float(w.abs().max()), least)
    ]
    if sum(a.numel() for _, a in tree_leaves_with_path(own)) >= sum(
        a.numel() for _, a in tree_leaves_with_path(params)
    ):
        wrong.append("nothing is cut")
    for sampling in () if time is not None else (None, Sampling(temperature=1.0, top_k=9, seed=3)):

        def generated(c, p, sampling=sampling):
            return Generator(c, p).generate([[1, 2, 3], [4]], 12, sampling=sampling)

        tokens = once(group, lambda: generated(config, single)), generated(*shard_heads(config, single, group))
        wrong += [] if tokens[0] == tokens[1] and len(tokens[0][0]) == 12 else [f"{tokens}"]
    return wrong


def work(rank, size, names):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "time"))
    chosen = {name: config for name, config in configs() if name in names or not names}
    found = {
        f"{name}, heads and time": differences(config, mesh["heads"], Cut(mesh["time"], (5, 4)))
        for name, config in chosen.items()
    }
    for count in (2, 3):
        group = new_group(list(range(count)))
        if rank < count:
            found |= {f"{name}, {count}": differences(config, group) for name, config in chosen.items()}
            if count == 3 and not names:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(heads._SumRows, "backward", staticmethod(lambda ctx, g: (g, None)))
                    found["planted"] = len(differences(dict(configs())["a group of all heads"], group))
                with pytest.raises(ArgumentError, match="shard_heads: 4 heads do not divide over 3 ranks"):
                    shard_heads(MAMBA2, take_layers_apart(to_device(random_params(MAMBA2))), group)
    return found


@pytest.mark.parametrize(
    "names", [("channels", "granite"), pytest.param((), marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
def test_equals_one_device(names, tmp_path):
    results = on_ranks(4, partial(work, names=names), tmp_path)
    assert all(results[rank].pop("planted") for rank in range(3) if not names)
    assert {(rank, case): lines for rank, found in results.items() for case, lines in found.items() if lines} == {}
    cases = len(names) or len(dict(configs()))
    assert [len(results[rank]) // cases for rank in range(4)] == [3, 3, 2, 1]
