"""Stored teachers: outputs that were exported once, for any number of runs.

cache_meta.py                    the description of a cache, without torch
cache_files.py                   its shards, and data sets whose packs carry a teacher's rows
teacher_topk.py                  top-k log-probabilities in a cache
teacher_hidden.py                hidden states in a cache, and the teacher's head
teacher_rows.py                  the rows of a pack or a micro-batch, of both
"""
