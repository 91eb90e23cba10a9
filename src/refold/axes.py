"""The legend: one letter per axis, everywhere in refold.

=====  ===========================================================================
axis   meaning
=====  ===========================================================================
``b``  batch
``t``  time (tokens, steps)
``h``  heads
``p``  head dimension (channels of one head)
``g``  groups of heads that share ``B`` and ``C``; head ``h`` reads group ``h // (H / G)``
``n``  state dimension
``d``  channels of a layer without heads (Mamba-1, convolution, norm)
``c``  chunks of a sequence
``l``  positions inside a chunk (``s`` for the second, summed one)
``w``  width of a causal convolution
``k``  sequences in a pack (``cu_seqlens`` has k + 1 entries)
=====  ===========================================================================

Tensors carry the letters of the Mamba papers: ``x dt A B C D z``; the state is ``(b, h, p, n)``.
A gradient is ``d`` + name. Sizes in Python are words: ``batch, seqlen, nheads, headdim, ngroups,
dstate, nchunks, chunk_size``.
"""

AXES = {
    "b": "batch",
    "t": "time",
    "h": "heads",
    "p": "head dimension",
    "g": "groups",
    "n": "state dimension",
    "d": "channels",
    "c": "chunks",
    "l": "position in chunk",
    "s": "summed position in chunk",
    "w": "convolution width",
    "k": "sequences in a pack",
}
