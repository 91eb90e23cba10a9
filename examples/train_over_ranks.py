"""A hybrid of transformers (Mamba-2 and attention) that trains on one sequence over processes: no GPU is needed.

Start it with ``torchrun --nproc-per-node 3 examples/train_over_ranks.py``.
"""

import torch
import torch.distributed as dist
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

import refold
from refold.parallel import shard

dist.init_process_group("gloo")
torch.manual_seed(0)
config = GraniteMoeHybridConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, layer_types=["mamba", "attention"], num_attention_heads=4,
    num_key_value_heads=2, shared_intermediate_size=32, num_local_experts=0, mamba_n_heads=4, mamba_d_state=8,
    position_embedding_type="rope", pad_token_id=None,
)  # fmt: skip
model = GraniteMoeHybridForCausalLM(config).train()
summary = refold.accelerate(model, group=dist.group.WORLD)
model.gradient_checkpointing_enable()

tokens = torch.arange(101)[None] % 7  # all ranks read the whole batch
documents = torch.tensor([0, 20, 75, 101])  # the second one crosses ranks
batch = {"input_ids": tokens, "labels": tokens, "cu_seq_lens_q": documents, "cu_seq_lens_k": documents}
found = summary.check(batch)  # in float64, against a copy on one device
print(f"largest difference from one device, of {len(found)} values: {max(found.values()):.0e}")

optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
own, cut = shard(batch, dist.group.WORLD)
for _ in range(6):
    optimizer.zero_grad()
    loss = model(**own).loss  # of the tokens of this rank, divided by the targets of all
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # the sum; DDP and FSDP average: with them, multiply the loss by the number of ranks
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(float(total))
assert losses[-1] < 0.8 * losses[0], losses
print(f"rank {cut.rank}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
dist.destroy_process_group()
