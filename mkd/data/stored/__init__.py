"""Stored teachers: predictions that were exported once, for any number of runs.

teacher_topk.py                  the cache on disk: description, shards, and data sets that carry its rows
teacher_rows.py                  the rows of a pack or a micro-batch
"""
