"""The student's own text: it completes prompts, and the teachers judge its completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mkd.config.options import settings
from mkd.config.schema import Config
from mkd.errors import MkdError, UsageError
from mkd.human import counted
from mkd.kinds.kind import Kind, Row
from mkd.kinds.sampled.rollout_batch import describe_rollouts, num_completions
from mkd.kinds.sampled.rollout_limits import check_rollout_model, check_rollouts
from mkd.kinds.sampled.rollout_metrics import ROLLOUT_METRICS
from mkd.kinds.sampled.sources.known_sources import KNOWN_SOURCES
from mkd.plan.facts import RunFacts
from mkd.plan.work import Work

if TYPE_CHECKING:  # they load torch
    from mkd.resolve.model_source import ModelSource
    from mkd.resolve.preflight import Tokenizers
    from mkd.resolve.run_plan import Plan

HOW_SAMPLED = frozenset(
    {"prompt_data_path", "rollout_slots", "rollout_server_url", "rollout_server_remote"}
    | {"rollout_server_timeout_s", "rollout_records", "rollout_records_timeout_s"}
)
"""The prompts have a fingerprint; the others decide where and how fast completions are sampled."""


class OwnText(Kind):
    """Runs that train on completions of the student."""

    metrics = ROLLOUT_METRICS
    calculates_with = ("on_policy_fraction", "max_new_tokens", "seq_length")

    def problems(self, facts: RunFacts) -> Iterator[UsageError]:
        yield from check_rollouts(facts)
        yield from check_rollout_model(facts)

    def file_problems(
        self,
        facts: RunFacts,
        tokenizers: Tokenizers | None,
        student: ModelSource | None,
        teachers: Sequence[ModelSource | None],
    ) -> list[MkdError]:
        from mkd.kinds.sampled.rollout_preflight import rollout_problems

        return rollout_problems(facts, tokenizers, student, teachers)

    def notes(self, plan: Plan) -> Iterator[str]:
        from mkd.kinds.sampled.rollout_preflight import rollout_notes

        return rollout_notes(plan)

    def work(self, config: Config) -> Work:
        """Return what completions add. Sampling is not timed."""
        rollout = config.rollout
        if not rollout.is_on:
            return Work()
        slots = rollout.rollout_slots if rollout.samples_here else 0
        lines = (partial(describe_rollouts, config),)
        completions = partial(num_completions, config)
        return Work(scores_for_metrics=True, slots=slots, completions=completions, lines=lines)

    def text_rows(self, config: Config) -> Iterator[Row]:
        rollout = config.rollout
        if rollout.is_on and not KNOWN_SOURCES[rollout.rollout_source].reads_prompts:
            lag = rollout.max_staleness
            yield (
                "rollouts",
                f"records of agents, sampled from p_s of at most {counted(lag, 'update')} before; loss on "
                "their sampled tokens, results of tools have none, no gradient through the sampling",
            )
        elif rollout.is_on:
            temperature = rollout.rollout_temperature
            sampled = "p_s" if temperature == 1 else f"p_s at T = {temperature:g}"
            dropped = "; truncated ones have no loss" if rollout.rollout_truncated == "drop" else ""
            yield (
                "rollouts",
                f"completions sampled from {sampled} in every step, up to {rollout.max_new_tokens} tokens"
                f"{dropped}; loss on their sampled tokens, stop token included, no gradient through the "
                "sampling",
            )

    def identity(self, config: Config) -> Mapping[str, object]:
        if not config.rollout.is_on:
            return {}
        return {
            option.path: value
            for option, value in settings(config)
            if option.section == "rollout" and option.field not in HOW_SAMPLED
        }
