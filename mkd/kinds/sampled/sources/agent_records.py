"""Records that agents write in another process, with the student's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mkd.config.schema import Config, RolloutConfig
from mkd.errors import UsageError
from mkd.kinds.judged.reward_settings import RECORDED
from mkd.kinds.sampled.sources.text_source import SourceParts, TextSource
from mkd.plan.checks.no_effect import no_effect

if TYPE_CHECKING:  # it loads torch
    from mkd.kinds.sampled.records.record_source import RecordSource


class AgentRecords(TextSource):
    """A folder of records."""

    settings = ("rollout_records", "rollout_records_timeout_s", "max_staleness")
    not_read = ("prompt_data_path", "max_new_tokens", "rollout_temperature", "rollout_slots")
    reads_prompts = False

    def problems(self, config: Config) -> Iterator[UsageError]:
        rollout, default = config.rollout, RolloutConfig()
        if rollout.rollout_records is None:
            what, why = "rollout-source is records, but there is no folder", "an agent writes records there"
            yield UsageError(what, why, "give --rollout-records FOLDER", code="add-flag")
        for field in self.not_read:
            if getattr(rollout, field) != getattr(default, field):
                why = "rollout-source is records, whose writer has the prompts and samples"
                yield no_effect(field.replace("_", "-"), why, "remove it")
        if config.grpo.is_on and config.grpo.reward != RECORDED:
            what = f"reward is {config.grpo.reward}, and rollout-source is records"
            why = "a function judges answers to prompts, and records bring their rewards"
            yield UsageError(what, why, f"use --reward {RECORDED}", code="reward-needs")

    def build(self, parts: SourceParts) -> RecordSource:
        from mkd.kinds.sampled.records.record_setup import build_record_source

        return build_record_source(parts)
