"""Families whose layers have one MLP, one file a family.

llama.py       the plainest one; the others differ from it
mistral.py     attention windows
qwen2.py       biases
qwen3.py       norms of query and key heads
phi3.py        fused tensors, LongRoPE
gemma3.py      norms around every block, two kinds of layers
gemma4.py      other heads in full attention, whose keys are its values
smollm3.py     layers that do not see positions
ministral3.py  queries that grow far behind the start of a document
granite.py     four factors; Granite 4 without Mamba
olmo3.py       norms behind the blocks alone, one norm of all heads
exaone4.py     norms behind the blocks alone; layers that do not see positions
hunyuan_v1_dense.py   norms of heads behind the rotation
apertus.py      MLPs without gates, with a learned activation
ernie4_5.py    rotation of neighbouring channels
seed_oss.py    biases on queries, keys and values
"""
