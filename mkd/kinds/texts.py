"""The record of the text of a run, which `mkd/run/read_texts.py` fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mkd.data.dataset import BlendedDataset
from mkd.data.prompts import PromptSet
from mkd.kinds.cross_tokenizer.cross_tokenizer_setup import CrossTokenizerTeacher
from mkd.kinds.sampled.reward.rewards import Rewards


@dataclass(frozen=True)
class Texts:
    """The text that the models of a run learn from on this rank, before any of them is built."""

    train_set: BlendedDataset | None  # None: the student's own text takes its place
    valid_set: BlendedDataset | None
    prompts: PromptSet | None  # that the student completes
    rewards: Rewards | None  # judges of these completions
    cross_tokenizer: Mapping[int, CrossTokenizerTeacher]  # by number of the teacher
    teacher_seq_lengths: tuple[int, ...]  # tokens of every teacher's packs
