"""Mixers: what a decoder layer has in place of attention.

pack_rows.py      the documents of a pack's rows, and the rows of context-parallel ranks
convolution.py    short causal convolution of packed documents
scan.py           the gated delta rule over packed documents, in torch
recurrence.py     the two operations of a mixer in which a token meets earlier ones
delta_net.py      the gated delta net of Qwen3-Next and Qwen3.5
"""
