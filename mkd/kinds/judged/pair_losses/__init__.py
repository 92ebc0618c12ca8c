"""Losses of preference pairs, each with its settings: a section of the configuration.

pair_loss.py  the interface
dpo.py        direct preference optimisation
simpo.py      SimPO, which needs no reference

To add one, write a subclass of `PairLoss` in a
file here, and a section of it in `mkd/config/schema.py` (docs/extending.md).
"""
