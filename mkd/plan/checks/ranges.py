"""Check the range of every number by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mkd.config.divergence import PARAMETERS
from mkd.config.options import Option, settings
from mkd.config.schema import Config
from mkd.errors import UsageError
from mkd.plan.facts import RunFacts

# Options that the checks of layouts, batches and packs calculate with.
SHARDS = ("tensor_model_parallel_size", "context_parallel_size")
STAGES = (
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
)
EXPERTS = ("expert_model_parallel_size", "teacher_expert_model_parallel_size", "expert_tensor_parallel_size")
BATCH = ("micro_batch_size", "global_batch_size")
PACKS = ("seq_length", "xtoken_seq_length", "micro_batch_size")

_LARGEST = 2**62  # sums with other settings still fit 64 bits
PILLOW_PIXELS = 178_956_970  # of a larger image Pillow opens not even the header
_GROUPS = (
    # Beyond these temperatures fp32 statistics lose precision.
    (
        "from 0.01 to 100",
        lambda x: 0.01 <= x <= 100,
        "kd_temperature teacher_temperature teacher_weighting_temperature",
    ),
    ("from 0 to 1", lambda x: 0 <= x <= 1, "kd_ratio on_policy_fraction"),
    ("0 (greedy) or from 0.01 to 100", lambda x: x == 0 or 0.01 <= x <= 100, "rollout_temperature"),
    ("from 0 to below 1", lambda x: 0 <= x < 1, "adam_beta1 adam_beta2 image_token_share"),
    ("above 0", lambda x: x > 0, "device_memory_gib exit_duration_in_mins adam_eps rollout_server_timeout_s"),
    ("above 0 and at most a million", lambda x: 0 < x <= 1e6, "distributed_timeout_minutes"),
    ("above 0 and at most 60 million", lambda x: 0 < x <= 6e7, "distributed_timeout_seconds_after_init"),
    ("at most a trillion", lambda x: x <= 10**12, "train_iters"),
    ("0 (never) or more", lambda x: x >= 0, "eval_interval eval_iters clip_grad"),
    (
        "0 or more",
        lambda x: x >= 0,
        "num_workers lr_warmup_iters ckpt_step seed "
        "eval_num_fewshot max_bad_records max_staleness "
        "save_interval_in_mins moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate",
    ),
    (
        "1 or more",
        lambda x: x >= 1,
        " ".join((*SHARDS, *STAGES, *EXPERTS, *BATCH, *PACKS))
        + " exit_interval recompute_num_layers lr_decay_iters lr_wsd_decay_iters save_interval "
        "save_retain_interval keep_checkpoints log_interval max_non_finite_skips "
        "xtoken_top_k rollout_prompts samples_per_prompt max_new_tokens rollout_slots "
        "max_image_side max_patches_per_pack",
    ),
    # Adam's steps are as long as the rate; torch takes no step length beyond fp32.
    ("from 0 to 1000", lambda x: 0 <= x <= 1000, "lr min_lr weight_decay"),
    (f"1 to {PILLOW_PIXELS}, Pillow's own limit", lambda x: 1 <= x <= PILLOW_PIXELS, "max_image_pixels"),
    *((one.valid, one.is_valid, f"kd_{one.name} teacher_{one.name}") for one in PARAMETERS),
)
_RANGES = {name: (wanted, is_fine) for wanted, is_fine, names in _GROUPS for name in names.split()}
"""Option -> (what it must be, True if a value is that)."""


def check_ranges(facts: RunFacts, names: Collection[str] | None = None) -> Iterator[UsageError]:
    """Check that every number is in its range, or only the options of these `names`."""
    for option, value, wanted in _out_of_range(facts.config):
        if names is None or option.name in names:
            what = f"{option.label} {value} must be {wanted}"
            why = f"{option.label}: {option.help}"
            yield UsageError(what, why, f"change {option.place}", code="out-of-range")


def options_out_of_range(facts: RunFacts) -> set[str]:
    """Return the names of the options that `check_ranges` reports."""
    return {option.name for option, *_ in _out_of_range(facts.config)}


def _out_of_range(config: Config) -> Iterator[tuple[Option, int | float, str]]:
    """Yield (option, value, what it must be). Settings that are not given (None) are fine."""
    for option, value in settings(config):
        wanted, is_fine = _RANGES.get(option.name, ("", lambda x: True))
        if option.valid is not None:
            wanted, is_fine = option.valid.text, option.valid.holds
        if isinstance(value, int) and value > _LARGEST:
            wanted, is_fine = "at most 2^62", lambda x: False
        if value is not None and not is_fine(value):
            yield option, value, wanted
