"""A tiny language model trains on a GPU as it does eagerly: with checkpointing, with autocast, with every check on."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from refold.compiler.backend import refold  # noqa: E402
from refold.compiler.dynamo import captures_loops  # noqa: E402
from refold.report import Report  # noqa: E402
from support.tiny_lm import losses  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("checkpointed", "autocast"), [(False, None), (True, None), (True, torch.bfloat16)])
def test_loss_curves(checkpointed, autocast):
    report = Report()

    def backend(gm, inputs):
        options = {"accept": "always", "strict": True, "cache": False, "report": report}
        return refold(gm, inputs, options=options)

    sizes = (2, 64, 64, 64, 16)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    own = losses(None, "cuda", checkpointed, autocast, sizes)
    got = losses(captures_loops(backend), "cuda", checkpointed, autocast, sizes)
    refused = [(row.name, row.reason) for row in report.graphs[0].rewrites if row.status == "refused"]
    assert "fuse chunked scan" in [row.name for row in report.graphs[0].applied], refused
    if autocast is None:
        assert (got - own).abs().max() < 1e-3
    else:
        exact = losses(None, "cuda", sizes=sizes)
        assert (got - exact).abs().mean() < 4 * (own - exact).abs().mean()
