"""Train a tiny Mamba-2 language model on the bytes of a text, with the layer of naive_mamba2.py as it is.

``python examples/train_tiny_lm.py --text README.md`` trains eagerly and with ``backend="refold"``, from the same
weights on the same batches, and prints both loss curves. Nothing in the model knows of refold. Options switch on
gradient checkpointing and autocast.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from naive_mamba2 import Model as Mixer
from torch.utils.checkpoint import checkpoint


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out: embedding, Mamba-2 layers with residual connections, shared head."""

    def __init__(self, layers=2, width=64, head_dim=16, state=16, chunk=16, checkpointed=False):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        heads = 2 * width // head_dim
        self.layers = nn.ModuleList(Mixer(width, heads, head_dim, state, 1, chunk) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers + 1))
        self.checkpointed = checkpointed

    def block(self, layer, norm, x):
        return x + layer(norm(x))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer, norm in zip(self.layers, self.norms[:-1], strict=True):
            if self.checkpointed:
                x = checkpoint(self.block, layer, norm, x, use_reentrant=False)
            else:
                x = self.block(layer, norm, x)
        return self.norms[-1](x) @ self.embedding.weight.mT


def batches(text, steps, batch, length, device="cpu", seed=0):
    """Yield pieces of a text, as (tokens, next tokens)."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - length - 1, (batch,), generator=generator)
        rows = torch.stack([data[i : i + length + 1] for i in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def train(model, pieces, rate=3e-3, autocast=None):
    """Train with AdamW; return the loss of each step."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.1)
    losses = []
    for tokens, targets in pieces:
        with torch.autocast(tokens.device.type, dtype=autocast, enabled=autocast is not None):
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "README.md")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--checkpoint", action="store_true", help="gradient checkpointing of each layer")
    parser.add_argument("--autocast", action="store_true", help="matrix products in bfloat16")
    arguments = parser.parse_args()
    curves = {}
    for name in ("eager", "refold"):
        torch.manual_seed(0)
        model = LanguageModel(width=arguments.width, checkpointed=arguments.checkpoint).to(arguments.device)
        run = model if name == "eager" else torch.compile(model, backend="refold")
        pieces = batches(
            arguments.text.read_bytes(), arguments.steps, arguments.batch, arguments.length, arguments.device
        )
        start = time.perf_counter()
        curves[name] = train(run, pieces, autocast=torch.bfloat16 if arguments.autocast else None)
        print(f"{name}: {time.perf_counter() - start:.1f} s, compile included")
    for i in [*range(0, arguments.steps, max(1, arguments.steps // 10)), arguments.steps - 1]:
        print(f"step {i}: " + ", ".join(f"{name} {float(losses[i]):.6f}" for name, losses in curves.items()))
    difference = (curves["eager"] - curves["refold"]).abs().max()
    print(f"largest difference of the losses: {float(difference):.1e}")


if __name__ == "__main__":
    main()
