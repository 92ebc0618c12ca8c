"""Stored teachers: predictions or hidden states exported once, and read by later runs.

stored_teachers.py   predictions as a kind of teacher: checks and loss card
hidden_teachers.py   hidden states as a kind of teacher: checks and loss card
cache_setup.py       whether a cache fits the run, and its rows in the data
topk_setup.py        the same of predictions
hidden_setup.py      the same of hidden states, and the teacher's head
stored_term.py       the term of the loss of predictions

The cache is in mkd/data/stored, the loss in mkd/losses/stored, and the export in mkd/run/stored.
"""
