"""Rewards of sampled answers: a function judges groups of completions of each prompt (GRPO)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from mkd.config.divergence import DivergenceSettings
from mkd.config.options import settings
from mkd.config.prompt_template import SIBLING
from mkd.config.schema import Config, RewardConfig
from mkd.errors import UsageError
from mkd.kinds.context.made_fields import made_fields
from mkd.kinds.judged.reward_settings import RECORDED
from mkd.kinds.kind import CardTerm, Kind, Row
from mkd.log.metrics import ROW_MEAN, STEP_MEAN, Metric
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts
from mkd.plan.work import Work

if TYPE_CHECKING:  # it loads torch
    from mkd.kinds.judged.policy_gradient import PolicyGradient

REWARD = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:function


class GRPO(Kind):
    """Runs in which a function judges the student's completions."""

    metrics = (
        Metric(
            "reward/mean",
            "1",
            STEP_MEAN,
            "mean reward of the completions; steps without any reward do not count. Metrics of rewards are "
            "absent without --reward",
            compact=("reward", 5),
            line=("reward", ".4f"),
        ),
        Metric(
            "reward/std0_groups",
            "proportion",
            STEP_MEAN,
            "fraction of prompts whose rewards are all the same, so that they teach nothing; prompts and "
            "steps without any reward do not count",
        ),
        Metric("reward/failed", "completions", STEP_MEAN, "completions of a step whose reward failed"),
        Metric(
            "reward/clipped",
            "proportion",
            ROW_MEAN,
            "fraction of sampled tokens whose ratio is clipped, in the last update of each iteration",
        ),
    )

    def problems(self, facts: RunFacts) -> Iterator[UsageError]:
        """Check that rewards judge groups of fresh completions, and that the loss has them."""
        config = facts.config
        reward, rollout, ratio = config.grpo, config.rollout, config.kd.kd_ratio
        if not reward.is_on:
            yield from _unread(reward)
            return
        given = f"reward is {reward.reward}"
        is_recorded, source = reward.reward == RECORDED, rollout.rollout_source
        if is_recorded and source != RECORDED:
            what, why = f"{given}, but rollout-source is {source}", "only records of agents hold rewards"
            yield UsageError(what, why, "use --rollout-source records", code="reward-needs")
        elif not is_recorded and not REWARD.fullmatch(reward.reward or ""):
            what, why = f"reward {reward.reward!r} is not module:function", "it is imported by this name"
            yield UsageError(what, why, "write it as my_rewards:exact", code="value-not-valid")
        if rollout.on_policy_fraction != 1:
            what = f"{given}, but on-policy-fraction is {rollout.on_policy_fraction}"
            why = "rewards judge what the student samples, and stored text has none"
            yield UsageError(what, why, "use --on-policy-fraction 1", code="reward-needs")
        made = made_fields(config)
        has_policy = ratio < 1
        if rollout.samples_per_prompt < 2 and not is_recorded and (has_policy or SIBLING in made):
            what = f"{given}, but samples-per-prompt is {rollout.samples_per_prompt}"
            why = "a reward counts relative to those of other completions of the same prompt"
            yield UsageError(what, why, "use --samples-per-prompt 8", code="reward-needs")
        if rollout.rollout_temperature != 1 and has_policy:
            what = f"{given}, but rollout-temperature is {rollout.rollout_temperature}"
            why = "the policy gradient is that of text that the student itself samples"
            yield UsageError(what, why, "use --rollout-temperature 1", code="reward-needs")
        if ratio == 1 and not made:
            what = f"{given}, but kd-ratio is 1"
            why = "the loss is (1 - kd-ratio) x policy loss + kd-ratio x KD"
            do = "use --kd-ratio 0, or a little more for a divergence from a reference"
            yield UsageError(what, why, do, code="reward-needs")
        if not reward.has_ratio and reward.clip_range != RewardConfig.clip_range:
            why = "with one update of each step's completions the ratio is 1"
            yield no_effect(f"clip-range {reward.clip_range}", why, "add --rollout-updates 2")
        yield from _reference(config)

    def work(self, config: Config) -> Work:
        reward = config.grpo
        is_on = has_policy_loss(config)
        scores_tokens = is_on and reward.has_ratio
        return Work(own_head_pass=is_on, scores_tokens=scores_tokens, updates=reward.rollout_updates)

    def card(self, config: Config) -> CardTerm | None:
        if not has_policy_loss(config):
            return None
        return CardTerm(
            name="policy",
            rows=tuple(_card_rows(config)),
            without_counterpart="others estimate the divergence from the sampled token",
        )

    def text_rows(self, config: Config) -> Iterator[Row]:
        if config.grpo.is_on and not has_policy_loss(config):
            made = " and ".join(f"{{{one}}}" for one in sorted(made_fields(config)))
            yield "reward", f"{config.grpo.reward}: it fills {made} of contexts, and has no loss"

    def identity(self, config: Config) -> Mapping[str, object]:
        return {
            f"loss.{option.field}": value
            for option, value in settings(config)
            if option.section == "grpo" and value != option.default and option.field not in _HOW_REWARDED
        }

    def data_term(self, config: Config, scored_ids: int) -> PolicyGradient | None:
        from mkd.kinds.judged.policy_gradient import PolicyGradient

        reward = config.grpo
        if not has_policy_loss(config):
            return None
        return PolicyGradient(reward.clip_range, reward.has_ratio, scored_ids)


def has_policy_loss(config: Config) -> bool:
    """Return True if rewards have a loss. With a kd-ratio of 1 they only fill contexts of teachers."""
    return config.grpo.is_on and config.kd.kd_ratio < 1


_HOW_REWARDED = ("reward_timeout_s", "max_failed_rewards")
"""Settings that do not change which completions a run learns from, as long as no reward fails."""


def _card_rows(config: Config) -> Iterator[Row]:
    reward, ratio, group = config.grpo, config.kd.kd_ratio, config.rollout.samples_per_prompt
    e = reward.clip_range
    several = f"min(rho A, clip(rho, {1 - e:g}, {1 + e:g}) A), rho = p_s / p when it was sampled"
    yield "policy", f"-{several if reward.has_ratio else 'A ln p_s (its gradient; the value is A)'}"
    if reward.reward == RECORDED:
        yield "A", "(R - mean) / (std + 1e-6) of the records of a group, or as a record says; R of the record"
    else:
        yield "A", f"(R - mean) / (std + 1e-6) of the {group} completions of a prompt; R = {reward.reward}"
    if ratio:
        yield "beta", f"{ratio / (1 - ratio):.6g}: KD / policy, as other engines weigh the divergence"
    if reward.rollout_updates > 1:
        yield "updates", f"{reward.rollout_updates} of each step's completions"


def _reference(config: Config) -> Iterator[UsageError]:
    """Check that the reference of rewards has the right divergence, if it runs."""
    kd, initial = config.kd, _place(config.student.hf, config.student.load)
    for teacher in config.teachers if config.needs_models and config.pair_loss is None else ():
        name = DivergenceSettings.from_config(kd, teacher).name
        if teacher.context is not None:
            continue  # it teaches what it knows
        if _place(teacher.hf, teacher.load) == initial and name != "reverse_kl":
            what = f"the reference is the initial student, but its divergence is {name}"
            why = "what holds a policy near its reference is KL(student || reference)"
            do = "add --kd-divergence reverse_kl, or use --kd-ratio 0"
            yield UsageError(what, why, do, code="reward-needs")


def _place(*names: str | None) -> tuple[str | None, ...]:
    """Return the folders behind names of models. A hub's name stays unique."""
    return tuple(name and os.path.realpath(name) for name in names)


def _unread(reward: RewardConfig) -> Iterator[UsageError]:
    """Yield settings of rewards without a reward."""
    for one in fields(reward):
        if getattr(reward, one.name) != one.default:
            setting = one.name.replace("_", "-")
            more = " --rollout-updates 2" if one.name == "clip_range" else ""
            yield no_effect(setting, "there is no --reward", f"add --reward module:function{more}")
