"""Models whose heads are cut over ranks by ``parallelize_module``: logits, gradients and tokens equal one device's."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import refold
from refold.errors import ArgumentError
from refold.integrations import heads
from refold.models.torch.heads import _SumRows
from support.families import OTHERS, ids, make, qwen
from support.ranks import on_ranks, once

pytestmark = pytest.mark.exhaustive
BOUND = 1e-6
"""Norms and heads of transformers round to float32."""
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 5}
NAMES = "mamba2", "bamba", "granitemoehybrid", "falcon_h1", "falcon_h1-normed", "nemotron_h", "zamba2"


def models(ranks):
    """Yield models: of each family whose heads divide, and with groups that several ranks read, or parts of them."""
    for name in NAMES:
        yield name, make(name)
    yield "one group", make("mamba2", n_groups=1)
    yield "biases", make("mamba2", use_bias=True, n_groups=1)
    yield "channels", make("falcon_mamba" if ranks == 3 else "mamba")
    yield "norms of what channels make", make("jamba")
    if "minimax" in OTHERS:
        yield "minimax", make("minimax")
    yield "parts of groups", make("qwen3_next", linear_num_value_heads=6, linear_num_key_heads=3)
    if ranks == 2:
        yield "heads of channels", make("zamba")
        yield "qwen3_5", qwen()
        yield "a group of all heads", make("qwen3_next", linear_num_key_heads=1)
        yield "olmo_hybrid", make("olmo_hybrid")
        yield "kimi_linear", make("kimi_linear")
        if "bailing_hybrid" in OTHERS:
            yield "bailing_hybrid", make("bailing_hybrid")


def local(a):
    return a.to_local() if isinstance(a, DTensor) else a


def gradients(model):
    """Return logits and gradients of the parameters that are trained."""
    logits = model(input_ids=ids(2)).logits
    F.cross_entropy(logits.double().flatten(0, 1), ids(2).flatten()).backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def on_one_device(model):
    """Return logits, gradients and tokens."""
    refold.accelerate(model)
    return *gradients(model), model.eval().float().generate(ids(2, 5), **GREEDY).tolist()


def compare(model, mesh):
    """Return the differences from one device; a model that holds its gradients is cut to see those of this rank."""
    many = model.double().train()
    wanted = copy.deepcopy(many)
    y, found, tokens = once(mesh, lambda: on_one_device(copy.deepcopy(many)))
    whole = sum(p.numel() for p in many.parameters())
    for name, p in wanted.named_parameters():
        p.data = torch.zeros_like(p) if name not in found else found[name]
    for cut in (many, wanted):
        parallelize_module(cut, mesh, refold.accelerate(cut).heads_plan())
    y_many, found = gradients(many)
    wrong = [] if torch.allclose(y_many, y, rtol=0, atol=BOUND * float(y.abs().max())) else ["logits"]
    least = 1e-3 * max(float(g.abs().max()) for g in found.values())
    for name, w in wanted.named_parameters():
        if name in found:
            w, g = local(w.detach()), local(found[name])
            error = float((g - w).abs().max() / w.abs().max().clamp(min=least))
            wrong += [] if error <= BOUND else [f"{name} {error:.1e}"]
    own = many.eval().float().generate(ids(2, 5), **GREEDY).tolist()  # which the lean model may read
    wrong += [] if own == tokens else [f"tokens {own}, not {tokens}"]
    return wrong + ([] if sum(local(p).numel() for p in many.parameters()) < whole else ["nothing is cut"])


def work(rank, size):
    found = {}
    for count in (2, 3):
        group = dist.new_group(list(range(count)))
        if rank < count:
            mesh = DeviceMesh.from_group(group, "cpu")
            found |= {f"{name}, {count}": compare(model, mesh) for name, model in models(count)}
            if count == 2:
                planted = {
                    "groups": (_SumRows, "backward", staticmethod(lambda ctx, g: (g, None))),
                    "norm": (heads._Norm, "forward", lambda self, x, z: x),
                }
                for bug, (owner, name, wrong) in planted.items():
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(owner, name, wrong)
                        found[f"planted {bug}"] = len(compare(make("mamba2", n_groups=1), mesh))
            else:
                with pytest.raises(ArgumentError, match="4 heads do not divide over 3 ranks"):
                    compare(qwen(), mesh)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return on_ranks(3, work, tmp_path_factory.mktemp("heads"))


def test_equals_one_device(results):
    wrong = {f"{case}, rank {rank}": lines for rank, found in results.items() for case, lines in found.items()}
    assert {case: lines for case, lines in wrong.items() if "planted" not in case and lines} == {}


def test_bugs_are_seen(results):
    planted = [{case: n for case, n in results[rank].items() if "planted" in case} for rank in (0, 1)]
    assert len(planted[0]) == 2
    assert all(n for found in planted for n in found.values())
