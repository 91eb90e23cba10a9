"""New memory holds the byte that the judge chose, so that what a candidate leaves unwritten shows each time."""

import torch

from refold.judge import Nursery
from refold.judge.process import Call

# Blocks of many sizes are made and given back in between: the C library keeps those of each size apart for reuse.
COUNTS = """
import random

import torch


class ModelNew(torch.nn.Module):
    def forward(self, x, byte):
        rng, others = random.Random(0), 0
        for _ in range(20000):
            kept = [torch.nn.functional.linear(torch.ones(rng.randrange(1, 12), 4), torch.ones(23, 4)).relu()
                    for _ in range(rng.randrange(4))]
            kept = kept[::-1][rng.randrange(3) :]
            new = torch.empty(rng.randrange(1, 250)).view(torch.uint8)
            others += int((new != byte).any())
        return x + others
"""


def test_all_new_memory_is_filled():
    with Nursery(threads=1) as nursery, nursery.program(COUNTS, "candidate.py", room=1 << 16) as process:
        process.load("ModelNew")
        how = {"seed": 0, "dtype": "float32", "device": "cpu", "train": False, "compiled": False}
        process.ask("build", attribute="ModelNew", arguments=process.ask("arguments", str), **how)
        for byte in (0xFF, 0x7B):
            tree = {"sequence": "tuple", "items": [{"tensor": 0}, {"value": byte}]}
            found = process.call(Call(tree, [torch.zeros(1)], perturb=byte))
            assert found.tensors[0].item() == 0, byte
