"""Mixers: what a decoder layer has in place of attention.

pack_rows.py          the documents of a pack's rows, and the rows of context-parallel ranks
convolution.py        short causal convolution of packed documents
scan.py               the recurrence of a mixer over packed documents, in torch
recurrence.py         what a mixer computes between its projections, in torch
fused_recurrence.py   the same for gated delta nets, as kernels of flash-linear-attention
chunk_gradients.py    one step of their backward, where Triton compiles it wrongly
mixer.py              what all mixers share: projections, exchange of rows for channels, checkpoints
delta_net.py          the gated delta net of Qwen3-Next and Qwen3.5
mamba.py              the Mamba-2 mixer of Nemotron-H
"""
