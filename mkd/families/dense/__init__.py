"""Families whose layers have one MLP, one file a family.

llama.py       the plainest one; the others differ from it
mistral.py     attention windows
qwen2.py       biases
qwen3.py       norms of query and key heads
phi3.py        fused tensors, LongRoPE
gemma3.py      norms around every block, two kinds of layers
seed_oss.py    biases on queries, keys and values
"""
