"""Stored teachers: outputs exported once, and read by later runs.

cache_description.py    what a cache is made of
cache_export.py         a teacher's outputs, exported for later runs
topk_export.py          predictions of its most probable ids
hidden_export.py        its hidden states and head
"""
