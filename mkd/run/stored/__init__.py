"""Stored teachers: predictions exported once, and read by later runs.

topk_description.py     what a stored teacher is made of
topk_export.py          a teacher's predictions, exported for later runs
"""
