"""The reward of `reward_gain.py`: 1 for the right answer, else 0. It needs no library."""

from __future__ import annotations


def exact(prompt: str, completion: str, fields: dict[str, str]) -> float:
    """Compare the last number of the completion with the answer."""
    return float(completion.split()[-1:] == [fields["answer"]])
