"""Where the state of a sequence lies in a pool of slots; `refold.ops.torch.slots.Places` has the meaning."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(
    source_ptr, target_ptr, accepted_ptr, seq, slots, pad, columns,
    stride_source_k, stride_source_m, stride_target_k,
):  # fmt: skip
    """Return the slot that is read, the one written at the end, whether both are there, and what outputs are if not."""
    column = seq * 0
    if accepted_ptr is not None:
        column += tl.minimum(tl.maximum(tl.load(accepted_ptr + seq), 1), columns) - 1
    read = seq
    if source_ptr is not None:
        read = tl.load(source_ptr + seq * stride_source_k + column * stride_source_m).to(tl.int64)
    write = read
    if accepted_ptr is None:
        write = tl.load(target_ptr + seq * stride_target_k).to(tl.int64)
    used = (read >= 0) & (read != pad) & (write >= 0) & (write != pad)
    there = (read < slots) & (write < slots)
    return read, write, used & there, tl.where(used, float("nan"), 0.0)


@triton.jit
def place_of_token(target_ptr, seq, t, slots, pad, kept, stride_target_k, stride_target_m):
    """Return the slot of the state after token t, and whether there is one."""
    slot = tl.load(target_ptr + seq * stride_target_k + t * stride_target_m, mask=t < kept, other=-1).to(tl.int64)
    return slot, (slot >= 0) & (slot != pad) & (slot < slots)


@triton.jit
def spread(flag, mask):
    """Return a mask, where a flag is set, else one of nothing; loads stay as wide as the mask lets them be."""
    return mask & (tl.zeros(mask.shape, tl.int32) + flag.to(tl.int32) > 0)
