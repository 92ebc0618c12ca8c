"""Check the losses of judged answers: DPO and GRPO."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import fields

from mkd.config.divergence import DivergenceSettings
from mkd.config.feedback import FeedbackConfig
from mkd.config.schema import Config, KDConfig
from mkd.errors import UsageError
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts

REWARD = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:function


def check_preferences(facts: RunFacts) -> Iterator[UsageError]:
    """Check that DPO stands alone, with one reference that runs on the student's tokens."""
    config = facts.config
    if not config.feedback.has_pairs:
        return
    given, teachers = f"dpo-beta is {config.feedback.dpo_beta}", config.teachers
    if config.kd.kd_ratio != 0:
        yield UsageError(
            f"{given}, but kd-ratio is {config.kd.kd_ratio}",
            "a divergence would also teach the rejected answers, and the reference already holds the student "
            "back",
            "use --kd-ratio 0, or distil in a run of its own",
            code="dpo-with-distillation",
        )
    if config.rollout.is_on:
        what = f"{given}, but on-policy-fraction is {config.rollout.on_policy_fraction}"
        why = "pairs are stored answers, and nobody has judged the student's own"
        yield UsageError(what, why, "remove one of them", code="dpo-with-rollouts")
    if len(teachers) > 1:
        what, why = (f"{given} with {len(teachers)} teachers", "the student is compared with one reference")
        yield UsageError(what, why, "keep one of them", code="dpo-with-several-references")
    if any(one.topk for one in teachers):
        what = f"{given} with a stored teacher"
        why = "the reference scores both answers, and stored predictions lack most tokens"
        yield UsageError(what, why, "give --teacher-hf, or no teacher", code="dpo-with-stored-reference")
    if any(one.xtoken for one in teachers):
        what = f"{given} with a cross-tokenizer teacher"
        why = "both models score the same tokens"
        do = "use a reference with the student's tokenizer"
        yield UsageError(what, why, do, code="dpo-with-cross-tokenizer-reference")
    yield from _of_divergences(config)


def _of_divergences(config: Config) -> Iterator[UsageError]:
    """Yield settings of divergences beside DPO, which has none."""
    why, given, default = "DPO has no divergence", config.kd, KDConfig()
    for name in ("kd_divergence", "kd_temperature", "kd_temperature_scaling"):
        if getattr(given, name) != getattr(default, name):
            yield no_effect(f"{name.replace('_', '-')} {getattr(given, name)}", why, "remove it")
    for index, teacher in enumerate(config.teachers):
        for name in ("divergence", "temperature"):
            if getattr(teacher, name) is not None:
                yield no_effect(f"teachers[{index}].{name} {getattr(teacher, name)}", why, "remove it")


def check_rewards(facts: RunFacts) -> Iterator[UsageError]:
    """Check that rewards judge groups of fresh completions, and that the loss has them."""
    config = facts.config
    feedback, rollout, ratio = config.feedback, config.rollout, config.kd.kd_ratio
    if not feedback.has_rewards:
        yield from _unread(feedback)
        return
    given = f"reward is {feedback.reward}"
    if not REWARD.fullmatch(feedback.reward or ""):
        what, why = f"reward {feedback.reward!r} is not module:function", "it is imported by this name"
        yield UsageError(what, why, "write it as my_rewards:exact", code="reward-name-not-valid")
    if rollout.on_policy_fraction != 1:
        what = f"{given}, but on-policy-fraction is {rollout.on_policy_fraction}"
        why = "rewards judge what the student samples, and stored text has none"
        yield UsageError(what, why, "use --on-policy-fraction 1", code="reward-without-rollouts")
    if rollout.samples_per_prompt < 2:
        what = f"{given}, but samples-per-prompt is {rollout.samples_per_prompt}"
        why = "a reward counts relative to those of other completions of the same prompt"
        yield UsageError(what, why, "use --samples-per-prompt 8", code="reward-without-group")
    if rollout.rollout_temperature != 1:
        what = f"{given}, but rollout-temperature is {rollout.rollout_temperature}"
        why = "the policy gradient is that of text that the student itself samples"
        yield UsageError(what, why, "use --rollout-temperature 1", code="reward-at-other-temperature")
    if ratio == 1:
        what, why = f"{given}, but kd-ratio is 1", "the loss is (1 - kd-ratio) x policy loss + kd-ratio x KD"
        do = "use --kd-ratio 0, or a little more for a divergence from a reference"
        yield UsageError(what, why, do, code="reward-without-weight")
    if feedback.rollout_updates == 1 and feedback.clip_range != FeedbackConfig.clip_range:
        why = "with one update of each step's completions the ratio is 1"
        yield no_effect(f"clip-range {feedback.clip_range}", why, "add --rollout-updates 2")
    yield from _reference(config)


def _reference(config: Config) -> Iterator[UsageError]:
    """Check that the reference of rewards has the right divergence, if it runs."""
    kd, initial = config.kd, _place(config.student.hf, config.student.load)
    for teacher in config.teachers if config.needs_models else ():
        name = DivergenceSettings.from_config(kd, teacher).name
        if _place(teacher.hf, teacher.load) == initial and name != "reverse_kl":
            what = f"the reference is the initial student, but its divergence is {name}"
            why = "what holds a policy near its reference is KL(student || reference)"
            do = "add --kd-divergence reverse_kl, or use --kd-ratio 0"
            yield UsageError(what, why, do, code="reference-divergence")


def _place(*names: str | None) -> tuple[str | None, ...]:
    """Return the folders behind names of models. A hub's name stays unique."""
    return tuple(name and os.path.realpath(name) for name in names)


def _unread(feedback: FeedbackConfig) -> Iterator[UsageError]:
    """Yield settings of rewards without a reward."""
    default = FeedbackConfig()
    for one in fields(feedback):
        if one.name != "dpo_beta" and getattr(feedback, one.name) != getattr(default, one.name):
            setting = one.name.replace("_", "-")
            yield no_effect(setting, "there is no --reward", "add --reward module:function")
