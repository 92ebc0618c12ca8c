"""The rows of the loss card for losses of judged answers."""

from __future__ import annotations

from collections.abc import Iterator

from mkd.config.models import teacher_names
from mkd.config.schema import Config

_COUNTED = "counted over all ranks and micro-batches before the first forward"


def preference_rows(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the rows about DPO."""
    beta, (reference,) = config.feedback.dpo_beta, teacher_names(config.teachers)
    yield (
        "DPO",
        f"-ln sigmoid(z), z = {beta:g} ((s_c - r_c) - (s_r - r_r)); s, r: sums of ln p over an answer under "
        f"the student and the reference {reference}, T = 1; c the chosen answer, r the rejected one",
    )
    yield "mask", "the tokens of both answers, their end included; never the prompt or padding"
    yield "normaliser", f"sums over the global batch divided once by its number of pairs, {_COUNTED}"
    yield "same in TRL", f"DPOConfig(beta={beta:g}), if every micro-batch has as many pairs"


def reward_rows(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the rows about GRPO."""
    feedback, ratio = config.feedback, config.kd.kd_ratio
    e, group = feedback.clip_range, config.rollout.samples_per_prompt
    several = f"min(rho A, clip(rho, {1 - e:g}, {1 + e:g}) A), rho = p_s / p when it was sampled"
    yield (
        "policy",
        f"-{several if feedback.rollout_updates > 1 else 'A ln p_s (its gradient; the value is A)'}",
    )
    yield "A", f"(R - mean) / (std + 1e-6) of the {group} completions of a prompt; R = {feedback.reward}"
    if ratio:
        yield "beta", f"{ratio / (1 - ratio):.6g}: KD / policy, as other engines weigh the divergence"
    if feedback.rollout_updates > 1:
        yield "updates", f"{feedback.rollout_updates} of each step's completions"
