"""Adapters out, as a folder that PEFT (huggingface/peft) loads onto the base model.

    adapter_model.safetensors   base_model.model.<module>.lora_A.weight [rank, in], .lora_B.weight [out, rank]
    adapter_config.json

A weight here may be several tensors of Hugging Face, such as queries, keys and values. Their A is the same
and is written for each; B is cut into their rows. The bytes are the same for every layout.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from mkd.checkpoint.hf.hf_adapters import factors_of
from mkd.checkpoint.hf.hf_folder import give_up, publish, start_writing
from mkd.checkpoint.hf.hf_names import TensorMap, factor_map, hf_tensor_shapes
from mkd.checkpoint.hf.hf_shards import ExportPlan, Shard, write_shards
from mkd.checkpoint.hf.hf_tower import DiskNames, tower_of
from mkd.checkpoint.hf.hf_writer import Owner, Sources, drain, raise_everywhere
from mkd.errors import CheckpointError
from mkd.parallel.context import ParallelContext
from mkd.plan.models.lora_shape import LoRAShape
from mkd.plan.models.model_shape import ModelShape

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_NAMES = {"a": ".lora_A.weight", "b": ".lora_B.weight"}
LOG = logging.getLogger("mkd")

# PEFT 0.21 takes gate_proj, up_proj and down_proj of these for their routed experts, which it looks for as
# transformers 5 stores them, and then has no adapters on dense MLPs and shared experts.
WITHOUT_MLPS = "deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite", "qwen3_moe", "qwen3_next"


def export_peft(
    model_parts: list[tuple[nn.Module, int]],  # as in `export_hf`
    shape: ModelShape,
    out_dir: Path,
    *,
    context: ParallelContext,
    lora: LoRAShape,
    base: str,  # folder or hub id of the model without adapters
) -> None:
    """Write the adapters of a model. Collective.

    Raises `CheckpointError` on every rank if the folder cannot be written. An adapter that is already there
    is replaced when the new one is complete.
    """
    sources = _Factors(model_parts, shape, context)
    tensors = {name: sources.full_shape(name) for name in _in_order(sources.owners, shape)}
    dtype = next(model_parts[0][0].parameters()).dtype
    name_of = DiskNames.of_shape(shape).in_transformers  # PEFT looks for modules, not for tensors of files
    plan = ExportPlan(
        dtype, (Shard(ADAPTER_FILE, tensors),), lambda name: f"base_model.model.{name_of(name)}", {}
    )
    tower = context.broadcast_object([name for part, _ in model_parts for name in tower_of(part)])
    others = {name_of(name) for name in (*hf_tensor_shapes(shape), *tower)}
    problem = None
    if context.is_first_replica:
        stream = (sources.collect(name, full, dtype) for name, full in tensors.items())
        if context.rank == 0:
            adapted = {name_of(_weight_of(name)) for name in tensors}
            config = adapter_config(lora, base, adapted, others)
            problem = _write(plan, stream, out_dir, config)
            _warn_of_peft(shape.hf_config.get("model_type"), adapted)
        else:
            drain(stream)
    raise_everywhere(context, problem)


class _Factors(Sources):
    """Finds the factors of adapters. A tensor's name is the weight's with the ending of PEFT."""

    def stored(self, model_part: nn.Module) -> dict[str, Tensor]:
        return factors_of(model_part)

    def owned(self, first_layers: list[int]) -> dict[str, list[Owner]]:
        found: dict[str, list[Owner]] = {}
        for part, (parameters, first_layer) in enumerate(zip(self.parameters, first_layers, strict=True)):
            for name, factor in parameters.items():
                owner = Owner(self.context.pp_rank, name, part, first_layer, tuple(factor.shape))
                weight = f"{name.rpartition('.')[0]}.weight"
                tensors = self.map_of(weight, replace(owner, parameter=weight)).tensors
                found |= {_factor_name(tensor, name): [owner] for tensor in tensors}
        return found

    def map_of(self, tensor: str, owner: Owner) -> TensorMap:
        if owner.parameter.endswith(".weight"):
            return super().map_of(tensor, owner)
        found = factor_map(self.shape, owner.parameter, owner.shard_shape, owner.first_layer)
        names = tuple(_factor_name(one, owner.parameter) for one in found.tensors)
        return replace(found, tensors=(tensor,) if found.is_replicated else names)

    def shard(self, owner: Owner) -> Tensor:
        return self.parameters[owner.part][owner.parameter].detach()

    def full_shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor over all ranks."""
        return self.map_of(tensor, self.owners[tensor][0]).tensor_shapes()[tensor]


def _factor_name(weight: str, factor: str) -> str:
    return weight.removesuffix(".weight") + _NAMES[factor[-1]]


def _weight_of(tensor: str) -> str:
    return tensor.rpartition(".lora_")[0] + ".weight"


def _in_order(names: Iterable[str], shape: ModelShape) -> list[str]:
    """Return the names of factors in the order of their weights in the model."""
    place = {name: number for number, name in enumerate(hf_tensor_shapes(shape))}
    return sorted(names, key=lambda name: (place[_weight_of(name)], name))


def adapter_config(
    lora: LoRAShape,
    base: str,
    adapted: set[str],  # names of weights with adapters
    others: set[str],  # names of all tensors of the model
) -> dict[str, object]:
    """Return adapter_config.json. Its targets are ends of names if these mean no other module."""
    modules = {name.removesuffix(".weight") for name in adapted}
    ends = {name.rpartition(".")[2] for name in modules}
    found = {name.removesuffix(".weight") for name in others if name.endswith(".weight")}
    is_exact = {name for name in found if name.rpartition(".")[2] in ends} == modules
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(ends if is_exact else modules),
        "inference_mode": True,
        "fan_in_fan_out": False,
        "use_rslora": False,
        "modules_to_save": None,
    }


def _warn_of_peft(model_type: object, adapted: set[str]) -> None:
    """Say which adapters PEFT does not put onto the model."""
    ends = {name.removesuffix(".weight").rpartition(".")[2] for name in adapted}
    problem = None
    if model_type in WITHOUT_MLPS and "gate_proj" in ends:
        problem = (
            "PEFT 0.21 leaves out its adapters on dense MLPs and shared experts: it expects routed experts"
        )
        targets = "qkv proj"
    elif model_type == "nemotron_h" and "out_proj" in ends:
        problem = "PEFT refuses adapters on out_proj of a Mamba-2 mixer"
        targets = "qkv fc1 fc2"
    if problem:
        do = f"use --export-hf, which has all adapters added, or train with --lora-targets {targets}"
        LOG.warning("the adapters of this model do not load as a whole: %s; %s", problem, do)


def _write(plan: ExportPlan, stream: Iterable[Tensor], out_dir: Path, config: dict) -> CheckpointError | None:
    """Write both files on rank 0. Return a failure only after the other ranks have sent everything."""
    try:
        stage = start_writing(out_dir)
        write_shards(plan, stream, stage)
        (stage / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        publish(out_dir)
    except OSError as error:
        drain(iter(stream))
        give_up(out_dir)
        what, why = (
            f"the adapter could not be written to {out_dir}: {error}",
            "--export-lora names the folder",
        )
        return CheckpointError(what, why, "make room or choose another folder", code="save-failed")
    return None
