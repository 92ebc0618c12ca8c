"""The record of the text of a run, which `mkd/run/read_texts.py` fills."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.data.dataset import BlendedDataset
from mkd.data.prompts import PromptSet
from mkd.kinds.sampled.reward.rewards import Rewards
from mkd.resolve.teacher_setup import TeacherSetup


@dataclass(frozen=True)
class Texts:
    """The text that the models of a run learn from on this rank, before any of them is built."""

    train_set: BlendedDataset | None  # None: the student's own text takes its place
    valid_set: BlendedDataset | None
    prompts: PromptSet | None  # that the student completes
    rewards: Rewards | None  # judges of these completions
    teachers: tuple[TeacherSetup, ...]  # with the tokens of their packs
    tag_names: tuple[str, ...] = ()  # of packs, in the order of their numbers; (): tags do not matter
