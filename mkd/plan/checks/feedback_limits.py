"""Check the losses of judged answers: DPO."""

from __future__ import annotations

from collections.abc import Iterator

from mkd.config.schema import Config
from mkd.errors import UsageError


def check_preferences(config: Config) -> Iterator[UsageError]:
    """Check that DPO stands alone, with one reference that runs on the student's tokens."""
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
