"""Families whose layers have attention or a mixer in its place, one file a family.

delta_nets.py   layers with gated delta nets and gated attention
qwen3_next.py   with experts
qwen3_5.py      the text models of Qwen3.5: dense, or with experts
"""
