"""Families whose layers have one MLP, one file a family.

llama.py       the plainest one; the others differ from it
mistral.py     attention windows
qwen2.py       biases
qwen3.py       norms of query and key heads
phi3.py        fused tensors, LongRoPE
gemma3.py      norms around every block, two kinds of layers
smollm3.py     layers that do not see positions
ministral3.py  queries that grow far behind the start of a document
granite.py     four factors; Granite 4 without Mamba
seed_oss.py    biases on queries, keys and values
"""
