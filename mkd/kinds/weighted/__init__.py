"""Records that count more or less than others in the cross entropy.

weight_settings.py   the key of the weight
weighted.py          the kind: checks, loss card, metric
weighted_term.py     the loss

The recipe "a loss with data of its own" of docs/extending.md explains these files.
"""
