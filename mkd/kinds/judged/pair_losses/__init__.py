"""Losses of preference pairs, each with its settings: a section of the configuration.

pair_loss.py has their interface; every other file is a loss. To add one, write a subclass of `PairLoss` in a
file here, and a section of it in `mkd/config/schema.py` (docs/extending.md).
"""
