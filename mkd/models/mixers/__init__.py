"""Mixers: what a decoder layer has in place of attention.

pack_rows.py      the documents of a pack's rows, and the rows of context-parallel ranks
convolution.py    short causal convolution of packed documents
scan.py           the recurrence of a mixer over packed documents, in torch
recurrence.py     the operations of a mixer in which a token meets earlier ones
mixer.py          what all mixers share: projections, exchange of rows for channels, checkpoints
delta_net.py      the gated delta net of Qwen3-Next and Qwen3.5
mamba.py          the Mamba-2 mixer of Nemotron-H
"""
