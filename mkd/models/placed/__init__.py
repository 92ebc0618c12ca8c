"""Frozen models whose decoder layers are elsewhere, or in FP8.

released_layers.py   layers that give up their memory when they are built
fp8_weights.py       a teacher whose linear layers are in FP8, with Transformer Engine's scales
residency.py         a teacher whose layers live in host memory or are split over peers
"""
