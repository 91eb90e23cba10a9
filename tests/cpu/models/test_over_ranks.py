"""Lean models on a sequence that ranks share: logits and states equal one device's, and decoding goes on from them."""

import inspect

import pytest
import torch
from torch.distributed import all_reduce, group
from torch.utils._pytree import tree_map

from refold.errors import ArgumentError
from refold.models.checkpoint import random_params
from refold.models.torch import model_for, take_layers_apart, to_device
from refold.parallel import Cut
from support.models import CONFIGS
from support.ranks import on_ranks

NAMES = [name for name in CONFIGS if "group" in inspect.signature(model_for(CONFIGS[name]).forward).parameters]
LENGTHS = 4, 1, 6


def work(rank, size):
    """Return the largest differences from one device, and what is said of lengths; states are float32."""
    found = {}
    for name in NAMES:
        config, model = CONFIGS[name], model_for(CONFIGS[name])
        grow = getattr(model, "grow_state", lambda state, room: state)
        params = tree_map(torch.Tensor.double, take_layers_apart(to_device(random_params(config))))
        params["embedding"].requires_grad_()
        ids = torch.randint(config.vocab_size, (2, sum(LENGTHS) + 1), generator=torch.Generator().manual_seed(0))
        for cut in (Cut(group.WORLD, LENGTHS), group.WORLD, Cut(group.WORLD, LENGTHS, "zigzag")):
            places = (cut if isinstance(cut, Cut) else Cut(group.WORLD, LENGTHS)).positions()
            own = ids[:, places]
            logits, state = model.forward(config, params, own, kind="all", group=cut)
            expected, after = model.forward(config, params, ids[:, :-1], kind="all")
            assert torch.equal(state["length"], after["length"])
            grads = [torch.autograd.grad(y.square().sum(), params["embedding"])[0] for y in (logits, expected)]
            all_reduce(grads[0])
            logits, expected = logits.detach(), expected.detach()
            pairs = [tuple(grads), (logits, expected[:, places]), *((state[n], after[n]) for n in state)]
            more = [{n: a.detach() for n, a in grow(s, ids.shape[1]).items()} for s in (state, after)]
            with torch.no_grad():
                pairs.append(tuple(model.step_(config, params, ids[:, -1], s) for s in more))
            found[f"{name} {cut}"] = max(float((a - b).abs().max()) / float(b.abs().max()) for a, b in pairs)
        try:
            model.forward(config, params, own, lengths=[1, 2], group=cut)
        except ArgumentError as error:
            found["error"] = str(error)
    return found


@pytest.mark.exhaustive
def test_lean_models_over_ranks(tmp_path):
    found = on_ranks(3, work, tmp_path)
    assert "with group, rows are equally long; got lengths=[1, 2]" in found[2].pop("error")
    wrong = {(rank, case): e for rank in found for case, e in found[rank].items() if case != "error" and e >= 1e-6}
    assert wrong == {}
    assert len(found[2]) == 3 * len(NAMES) == 3 * len(CONFIGS)
