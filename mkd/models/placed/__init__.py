"""Frozen models whose decoder layers are elsewhere, or in FP8.

released_layers.py   layers that give up their memory when they are built
converted_weights.py weights that are replaced while they are read
fp8_weights.py       a dense teacher whose linear layers are in FP8, with Transformer Engine's scales
residency.py         a teacher whose layers live in host memory or are split over peers
"""
