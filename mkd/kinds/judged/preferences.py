"""Preference pairs: a loss that compares a chosen with a rejected answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import chain
from typing import TYPE_CHECKING

from mkd.config.divergence import TEACHER_FIELDS
from mkd.config.models import FROZEN, teacher_names
from mkd.config.options import settings
from mkd.config.schema import PAIR_LOSSES, Config, KDConfig
from mkd.data.records.wanted import WantedRecords
from mkd.errors import UsageError
from mkd.kinds.judged.pair_losses.pair_loss import PairLoss
from mkd.kinds.kind import CardTerm, Kind
from mkd.kinds.placed.known_places import rounding
from mkd.log.metrics import ROW_MEAN, Metric
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts
from mkd.plan.work import Work

if TYPE_CHECKING:  # it loads torch
    from mkd.kinds.judged.pair_term import PairTerm

_COUNTED = "counted over all ranks and micro-batches before the first forward"


def pair_metrics(loss: type[PairLoss]) -> Iterator[Metric]:
    """Yield the metrics of a pair loss."""
    yield Metric(
        f"{loss.prefix}/margin",
        "nats",
        ROW_MEAN,
        f"{loss.margin_help()}. {loss.title}'s metrics are absent without --{loss.prefix}-beta",
        compact=("margin", 6),
        line=(f"{loss.prefix} margin", ".4f"),
    )
    yield Metric(
        f"{loss.prefix}/accuracy",
        "proportion",
        ROW_MEAN,
        "fraction of pairs whose margin is above 0",
        compact=("acc", 4),
        line=(f"{loss.prefix} accuracy", ".4f"),
    )
    for name, text in loss.part_help.items():
        yield Metric(f"{loss.prefix}/{name}", "nats", ROW_MEAN, text)


class Pairs(Kind):
    """Runs whose records are preference pairs."""

    metrics = tuple(chain.from_iterable(map(pair_metrics, PAIR_LOSSES)))

    def problems(self, facts: RunFacts) -> Iterator[UsageError]:
        config, losses = facts.config, facts.config.pair_losses
        yield from _unread(config)
        if not losses:
            return
        given = f"{losses[0].flag[2:]} is {losses[0].beta}"
        if len(losses) > 1:
            flags = " and ".join(one.flag for one in losses)
            why = "each is a loss of the same pairs, and a run has one of them"
            yield UsageError(f"{flags} exclude each other", why, "keep one", code="exclude-each-other")
        if config.kd.kd_ratio != 0:
            held = ", and the reference already holds the student back" if losses[0].needs_reference else ""
            yield UsageError(
                f"{given}, but kd-ratio is {config.kd.kd_ratio}",
                f"a divergence would also teach the rejected answers{held}",
                "use --kd-ratio 0, or distil in a run of its own",
                code="preferences-exclude",
            )
        if config.rollout.is_on:
            what = f"{given}, but on-policy-fraction is {config.rollout.on_policy_fraction}"
            why = "pairs are stored answers, and nobody has judged the student's own"
            yield UsageError(what, why, "remove one of them", code="preferences-exclude")
        if losses[0].needs_reference:
            yield from _reference(config, given)
        yield from _divergences(config, losses[0].title)

    def work(self, config: Config) -> Work:
        return Work(scores_tokens=config.pair_loss is not None)

    def card(self, config: Config) -> CardTerm | None:
        loss = config.pair_loss
        if loss is None:
            return None
        scores, rounded = "s: sums of ln p over an answer under the student", ""
        if loss.needs_reference:
            (reference,) = teacher_names(config.teachers)
            scores = f"s, r: sums of ln p over an answer under the student and the reference {reference}"
            rounded = "".join(rounding(one, "r") for one in config.teachers)
        lengths = "; n its tokens" if "n_c" in loss.formula() else ""
        trl = loss.in_trl()
        same = f"{trl}, if every micro-batch has as many pairs" if trl else "nothing: it has no equal loss"
        text = f"{loss.formula()}; {scores}, T = 1{lengths}; c the chosen answer, r the rejected one{rounded}"
        return CardTerm(
            name=loss.title,
            rows=((loss.title, text),),
            unit="pair",
            mask="the tokens of both answers, their end included; never the prompt or padding",
            normaliser=f"sums over the global batch divided once by its number of pairs, {_COUNTED}",
            elsewhere=(("same in TRL", same),),
        )

    def records(self, config: Config) -> WantedRecords:
        return WantedRecords(pairs=config.pair_loss is not None)

    def identity(self, config: Config) -> Mapping[str, object]:
        sections = {one.name for one in fields(config) if isinstance(getattr(config, one.name), PairLoss)}
        return {
            f"loss.{option.field}": value
            for option, value in settings(config)
            if option.section in sections and value != option.default
        }

    def data_term(self, config: Config, scored_ids: int) -> PairTerm | None:
        from mkd.kinds.judged.pair_term import PairTerm

        return None if config.pair_loss is None else PairTerm(config.pair_loss)


def _unread(config: Config) -> Iterator[UsageError]:
    """Yield settings of losses that are off."""
    for option, value in settings(config):
        loss = getattr(config, option.section, None)
        if isinstance(loss, PairLoss) and loss.beta is None and value != option.default:
            setting = f"{option.label} {value}"
            excluded = config.pair_loss is not None or config.rollout.is_on or follows_or_stored(config)
            do = f"add {loss.flag}" + " --kd-ratio 0" * (config.kd.kd_ratio != 0)
            yield no_effect(setting, f"there is no {loss.flag}", "remove it" if excluded else do)


def follows_or_stored(config: Config) -> bool:
    """Return True if a teacher is no reference of pairs: a stored one, or one that changes."""
    return any((one.stand_in and not one.is_apart) or one.weights != FROZEN for one in config.teachers)


def _reference(config: Config, given: str) -> Iterator[UsageError]:
    """Check that there is one reference, which runs on the student's tokens."""
    teachers = config.teachers
    if len(teachers) > 1:
        what, why = f"{given} with {len(teachers)} teachers", "the student is compared with one reference"
        yield UsageError(what, why, "keep one of them", code="preferences-exclude")
    for stand_in in {one.stand_in for one in teachers if one.stand_in and not one.is_apart}:
        what = f"{given} with teacher-{stand_in}"
        why = "the reference scores both answers, for which its model has to run"
        yield UsageError(what, why, "give --teacher-hf, or no teacher", code="preferences-exclude")
    if any(one.xtoken for one in teachers):
        what = f"{given} with a cross-tokenizer teacher"
        why = "both models score the same tokens"
        do = "use a reference with the student's tokenizer"
        yield UsageError(what, why, do, code="preferences-exclude")


def _divergences(config: Config, title: str) -> Iterator[UsageError]:
    """Yield settings of divergences beside a pair loss, which has none."""
    why, given, default = f"{title} has no divergence", config.kd, KDConfig()
    for name in (*(f"kd_{one}" for one in TEACHER_FIELDS), "kd_temperature", "kd_temperature_scaling"):
        if getattr(given, name) != getattr(default, name):
            yield no_effect(f"{name.replace('_', '-')} {getattr(given, name)}", why, "remove it")
    for index, teacher in enumerate(config.teachers):
        for name in (*TEACHER_FIELDS, "temperature"):
            if getattr(teacher, name) is not None:
                yield no_effect(f"teachers[{index}].{name} {getattr(teacher, name)}", why, "remove it")
