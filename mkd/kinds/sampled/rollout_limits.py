"""Check the settings of rollouts, and that the student can sample in this layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from mkd.config.schema import Config, RolloutConfig
from mkd.errors import UsageError
from mkd.kinds.sampled.sources.known_sources import KNOWN_SOURCES, source_problems
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts
from mkd.plan.models.model_shape import ModelShape

OFF = "or train on stored text: --on-policy-fraction 0"


def check_rollouts(facts: RunFacts) -> Iterator[UsageError]:
    """Check that rollouts have what they need, and that nothing else has their settings."""
    config, rollout, default = facts.config, facts.config.rollout, RolloutConfig()
    if not rollout.is_on:
        for one in fields(rollout):
            if getattr(rollout, one.name) != getattr(default, one.name):
                setting = one.name.replace("_", "-")
                yield no_effect(setting, "on-policy-fraction is 0", _turned_on(facts.config, one.name))
        return
    reads_prompts = KNOWN_SOURCES[rollout.rollout_source].reads_prompts
    if reads_prompts and not rollout.prompt_data_path:
        what = f"on-policy-fraction is {rollout.on_policy_fraction}, but there are no prompts"
        do = "give --prompt-data-path FILE"
        yield UsageError(what, "the student completes prompts", do, code="data-path-missing")
    if config.kd.kd_ratio != 1 and not config.grpo.is_on:
        yield UsageError(
            f"on-policy-fraction is {rollout.on_policy_fraction}, but kd-ratio is {config.kd.kd_ratio}",
            "the cross entropy with the student's own samples has a mean gradient of 0: it is only noise",
            f"use --kd-ratio 1, {OFF}",
            code="rollouts-exclude",
        )
    if reads_prompts and rollout.max_new_tokens >= config.training.seq_length:
        yield UsageError(
            f"max-new-tokens {rollout.max_new_tokens} leaves no room for a prompt in seq-length "
            f"{config.training.seq_length}",
            "a prompt and its completion are one document of a pack",
            "lower --max-new-tokens, or raise --seq-length",
            code="numbers-contradict",
        )
    yield from source_problems(config)


def _turned_on(config: Config, field: str) -> str:
    """Return what gives a setting of rollouts an effect in a run without them; "remove it" if little does."""
    if config.pair_loss is not None or any(one.stand_in and not one.is_apart for one in config.teachers):
        return "remove it"
    rollout, source = config.rollout, KNOWN_SOURCES[config.rollout.rollout_source]
    readers = {name: one for name, one in KNOWN_SOURCES.items() if field in one.settings}
    flags = ["--on-policy-fraction 1"]
    if readers and field not in source.settings:
        name = "records" if rollout.max_staleness > 1 else next(iter(readers))
        source = readers.get(name, source)
        flags.append(f"--rollout-source {name}")
    if source.reads_prompts and not rollout.prompt_data_path:
        flags.append("--prompt-data-path FILE")
    if config.kd.kd_ratio != 1 and not config.grpo.is_on:
        flags.append("--kd-ratio 1")
    return f"add {' '.join(flags)}"


def sampling_limit(student: ModelShape, length: int) -> str | None:
    """Return the part with which mkd cannot sample texts of `length` tokens; None if it can."""
    if any(layer.mla for layer in student.layers):
        return "latent attention"
    if any(layer.attention_sinks for layer in student.layers):
        return "attention sinks"
    if any(
        rope.kind == "longrope" and length > rope.original_max_position_embeddings for rope in student.ropes
    ):
        return "positions that depend on the length of the text (LongRoPE beyond its original length)"
    return None


def check_rollout_model(facts: RunFacts) -> Iterator[UsageError]:
    """Check that the student's layers can sample with a cache."""
    config, student = facts.config, facts.student
    samples = config.rollout.is_on and KNOWN_SOURCES[config.rollout.rollout_source].reads_prompts
    if not samples or student is None:
        return
    reason = sampling_limit(student, config.training.seq_length)
    if reason is not None:
        what = f"the student has {reason}, with which mkd cannot sample yet"
        why = "keys and values of earlier tokens are cached as they are"
        yield UsageError(what, why, f"use another student, {OFF}", code="rollouts-exclude")
