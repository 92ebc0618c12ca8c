"""Stored teachers: predictions exported once, and read by later runs.

stored_teachers.py   the kind of teacher: checks and loss card
stored_setup.py      whether the cache fits the run, and its rows in the data
stored_term.py       the term of the loss

The cache is in mkd/data/stored, the loss in mkd/losses/stored, and the export in mkd/run/stored.
"""
