"""Families whose layers have attention or a mixer in its place, one file a family.

delta_nets.py   layers with gated delta nets and gated attention
mixer_rules.py  how parameters of mixers are cut
nemotron_h.py   one of mixer, attention and MLP a layer
qwen3_next.py   with experts
qwen3_5.py      the text models of Qwen3.5: dense, or with experts
"""
