"""Lean models on a sequence that ranks share: logits and states equal one device's, and decoding goes on from them."""

import inspect

import torch
from torch.distributed import group

from refold.errors import ArgumentError
from refold.models.checkpoint import random_params
from refold.models.torch import model_for, take_layers_apart, to_device
from refold.parallel import Cut
from support.models import CONFIGS
from support.ranks import on_ranks

NAMES = [name for name in CONFIGS if "group" in inspect.signature(model_for(CONFIGS[name]).forward).parameters]
LENGTHS = 4, 1, 6


def work(rank, size):
    """Return the largest differences from one device, and what is said of lengths."""
    found, begin = {}, sum(LENGTHS[:rank])
    for name in NAMES:
        config, model = CONFIGS[name], model_for(CONFIGS[name])
        params = take_layers_apart(to_device(random_params(config)))
        ids = torch.randint(config.vocab_size, (2, sum(LENGTHS) + 1), generator=torch.Generator().manual_seed(0))
        own = ids[:, begin : begin + LENGTHS[rank]]
        for cut in (Cut(group.WORLD, LENGTHS), group.WORLD):
            logits, state = model.forward(config, params, own, kind="all", group=cut)
            expected, after = model.forward(config, params, ids[:, :-1], kind="all")
            assert torch.equal(state["length"], after["length"])
            pairs = [(logits, expected[:, begin : begin + LENGTHS[rank]]), *((state[n], after[n]) for n in state)]
            pairs.append(tuple(model.step_(config, params, ids[:, -1], s) for s in (state, after)))
            found[name] = max(float((a - b).abs().max()) / float(b.abs().max()) for a, b in pairs)
        try:
            model.forward(config, params, own, lengths=[1, 2], group=cut)
        except ArgumentError as error:
            found["error"] = str(error)
    return found


def test_lean_models_over_ranks(tmp_path):
    found = on_ranks(3, work, tmp_path)
    assert "with group, rows are equally long; got lengths=[1, 2]" in found[2].pop("error")
    assert all(found[2][name] < 1e-5 for name in NAMES), found
    assert all(found[rank][name] < 1e-5 for rank in (0, 1) for name in NAMES), found
