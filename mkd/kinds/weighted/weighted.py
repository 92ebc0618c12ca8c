"""Records with weights: some count more than others in the cross entropy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mkd.config.schema import Config
from mkd.data.records.wanted import ANY_RECORDS, WantedRecords
from mkd.errors import UsageError
from mkd.kinds.kind import NOTHING, CardTerm, Kind
from mkd.kinds.weighted.weight_settings import LOSS_KEY
from mkd.log.metrics import ROW_MEAN, Metric
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts
from mkd.plan.work import Work

if TYPE_CHECKING:  # it loads torch
    from mkd.kinds.weighted.weighted_term import WeightedCrossEntropy


class Weighted(Kind):
    """Runs whose records have weights."""

    metrics = (
        Metric(
            LOSS_KEY,
            "nats/token",
            ROW_MEAN,
            "cross entropy in which every loss token counts with the weight of its record. ce_loss is the "
            "same without weights. Absent without --weight-key",
            compact=("weighted", 8),
            line=("weighted ce loss", ".6E"),
        ),
    )

    def problems(self, facts: RunFacts) -> Iterator[UsageError]:
        config, key = facts.config, facts.config.weighted.weight_key
        if key is None:
            return
        given = f"weight-key is {key}"
        if config.kd.kd_ratio == 1:
            why = "at kd-ratio 1 the loss has no cross entropy"
            yield no_effect(f"weight-key {key}", why, "use a --kd-ratio below 1")
        if config.pair_loss is not None:
            what = f"{given}, but {config.pair_loss.flag[2:]} is {config.pair_loss.beta}"
            why = "a loss of pairs takes the place of the cross entropy"
            yield UsageError(what, why, "remove one of them", code="exclude-each-other")
        if config.rollout.is_on:
            what = f"{given}, but on-policy-fraction is {config.rollout.on_policy_fraction}"
            why = "records have weights, and the student's own text has none"
            yield UsageError(what, why, "remove one of them", code="exclude-each-other")

    def work(self, config: Config) -> Work:
        return Work(own_head_pass=config.weighted.weight_key is not None)

    def records(self, config: Config) -> WantedRecords:
        key = config.weighted.weight_key
        return ANY_RECORDS if key is None else WantedRecords(numbers=(key,), weights=(key,))

    def card(self, config: Config) -> CardTerm | None:
        key = config.weighted.weight_key
        if key is None:
            return None
        by_tokens = "; KD by the number of loss tokens" if config.kd.kd_ratio else ""
        return CardTerm(
            name="weighted CE",
            rows=(("weighted CE", f"-w ln p_s(next token), T = 1; w is {key} of the record"),),
            normaliser="sums over the global batch divided once by the sum of w over its loss tokens, taken "
            f"over all ranks and micro-batches before the first forward{by_tokens}",
            without_counterpart="their records have no weights",
        )

    def identity(self, config: Config) -> Mapping[str, object]:
        key = config.weighted.weight_key
        return NOTHING if key is None else {"loss.weight_key": key}

    def data_term(self, config: Config, scored_ids: int) -> WeightedCrossEntropy | None:
        from mkd.kinds.weighted.weighted_term import WeightedCrossEntropy

        key = config.weighted.weight_key
        return None if key is None else WeightedCrossEntropy(key)
