"""The composition of a step with completions of the student."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.schema import Config
from mkd.human import counted


@dataclass(frozen=True)
class RolloutBatch:
    """Composition of one optimizer step."""

    prompts: int
    samples_per_prompt: int
    stored_packs: int  # packs of --data-path

    @classmethod
    def from_config(cls, config: Config, global_batch_size: int) -> RolloutBatch:
        """Return the composition; rollouts replace a fraction of the `global_batch_size` packs."""
        rollout = config.rollout
        replaced = round(rollout.on_policy_fraction * global_batch_size)
        prompts = rollout.rollout_prompts or max(1, round(replaced / rollout.samples_per_prompt))
        return cls(prompts, rollout.samples_per_prompt, global_batch_size - replaced)

    @property
    def num_rollouts(self) -> int:
        """Completions of a step, on all data-parallel replicas."""
        return self.prompts * self.samples_per_prompt


def num_completions(config: Config, global_batch_size: int) -> int:
    """Return the completions of a step, on all processes."""
    return RolloutBatch.from_config(config, global_batch_size).num_rollouts


def describe_rollouts(config: Config, global_batch_size: int) -> str:
    """Return the composition of a step as a line of the plan."""
    batch = RolloutBatch.from_config(config, global_batch_size)
    is_written = config.rollout.rollout_source == "records"
    own = f"{counted(batch.prompts, 'group' if is_written else 'prompt')} x {batch.samples_per_prompt}"
    own += f" = {counted(batch.num_rollouts, 'record' if is_written else 'completion')}"
    longest = config.training.seq_length if is_written else config.rollout.max_new_tokens
    limit = f"of at most {longest} tokens"
    stored = f"and {counted(batch.stored_packs, 'pack')} of --data-path"
    return f"a step trains on {own} {limit}, {stored}; predicted times leave sampling out"
