"""The numbers of a step with rollouts, and the memory of their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mkd.config.schema import Config
from mkd.families.layer_shape import LayerShape
from mkd.human import counted
from mkd.plan.model_shape import ModelShape

LOGIT_BYTES = 16  # of a logit while a token is sampled: fp32, its exponential, products


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


def describe_rollouts(config: Config, global_batch_size: int) -> str:
    """Return the composition of a step as a line of the plan."""
    batch = RolloutBatch.from_config(config, global_batch_size)
    own = f"{counted(batch.prompts, 'prompt')} x {batch.samples_per_prompt}"
    own += f" = {counted(batch.num_rollouts, 'completion')}"
    limit = f"of at most {config.rollout.max_new_tokens} tokens"
    stored = f"and {counted(batch.stored_packs, 'pack')} of --data-path"
    return f"a step trains on {own} {limit}, {stored}; predicted times leave sampling out"


def cache_bytes(
    config: Config, slots: int, shape: ModelShape, layers: Sequence[LayerShape], element: int
) -> int:
    """Return the bytes of the keys and values of `layers` on one process, all `slots` full.

    `element` is the size of a number, bytes.
    """
    tensor = config.parallel.tensor_model_parallel_size
    groups = shape.padded_query_groups(tensor) // tensor
    of_token = 2 * len(layers) * groups * shape.head_dim * element
    return slots * config.training.seq_length * of_token


def sampling_bytes(slots: int, vocab_rows: int) -> int:
    """Return the bytes of the logits of one new token in every slot; `vocab_rows` of one process."""
    return slots * vocab_rows * LOGIT_BYTES
