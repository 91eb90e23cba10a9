"""Train the language model of examples/train_tiny_lm.py, eagerly and with a backend, on the same batches."""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
STEPS = 200


def losses(backend, device="cpu", checkpointed=False, autocast=None, sizes=(2, 16, 8, 8, 8), steps=STEPS):
    """Return the loss of each step; backend None is eager."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import train_tiny_lm as example
    finally:
        sys.path.remove(str(ROOT / "examples"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = example.LanguageModel(*sizes, checkpointed=checkpointed).to(device)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    text = (ROOT / "docs" / "glossary.md").read_bytes()
    return example.train(run, example.batches(text, steps, 2, 32, device), autocast=autocast)
