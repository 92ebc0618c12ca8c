"""The student as a Hugging Face folder: the teacher's tensors without what was cut, one at a time."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig

from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_check import check_hf_checkpoint
from mkd.checkpoint.hf.hf_names import exists, hf_tensor_shapes
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.checkpoint.hf.hf_shards import DTYPE_NAMES, export_plan, stored_dtype
from mkd.checkpoint.hf.hf_writer import prepare_folder, write_folder
from mkd.errors import UsageError
from mkd.families.layer_shape import LayerShape
from mkd.families.registry import FAMILIES
from mkd.families.weight_rules import (
    FFN,
    GATE_UP,
    GATE_UP_BIAS,
    HEAD,
    HEADS,
    HIDDEN,
    KEPT_IN_FP32,
    MODEL_TABLE,
    QKV,
    QKV_BIAS,
    UP,
    UP_BIAS,
    VOCABULARY,
    Entry,
)
from mkd.plan.models.model_shape import ModelShape
from mkd.pruning.cut import Cut

LAYER_NUMBER = re.compile(r"(?<=^model\.layers\.)\d+(?=\.)")
IN_GROUPS, UNCUT = (QKV, QKV_BIAS, HEADS), (HEAD, VOCABULARY, HIDDEN)
IN_FFN = (GATE_UP, GATE_UP_BIAS, UP, UP_BIAS, FFN)


def write_student(teacher_dir: Path, out_dir: Path, cut: Cut) -> ModelShape:
    """Write the student and return its shape. Weights keep their dtype on disk; if they have several, fp32.

    A model that is already in `out_dir` is replaced, once the new files are complete. Raises CheckpointError
    for a teacher that is damaged or a folder that cannot be written, and UsageError for a cut that the
    family cannot express.
    """
    teacher, checkpoint = ModelShape.from_hf_dir(teacher_dir), HFCheckpoint(teacher_dir)
    check_hf_checkpoint(teacher, checkpoint)
    if cut.is_narrower:
        require_width_rules(teacher)
    student, config = cut.shape(teacher), cut.config(teacher)
    require_loadable(config)
    names = (name for name in hf_tensor_shapes(teacher) if not name.endswith(KEPT_IN_FP32))
    stored = {checkpoint.headers[name].dtype for name in names}
    dtypes = [dtype for dtype, name in DTYPE_NAMES.items() if stored == {name}]
    plan = export_plan(student, dtypes[0] if dtypes else torch.float32)
    with tempfile.TemporaryDirectory() as described:
        (Path(described) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        generation = teacher_dir / "generation_config.json"
        if generation.exists():
            shutil.copyfile(generation, Path(described) / generation.name)
        assets = HFAssets(Path(described), teacher_dir)
        problem = prepare_folder(student, out_dir, assets)
        if problem is None:
            dtypes = [stored_dtype(name, plan.dtype) for name, _ in plan.tensors()]
            cut_ones = zip(dtypes, cut_tensors(checkpoint, teacher, cut), strict=True)
            tensors = (tensor.to(dtype) for dtype, tensor in cut_ones)
            problem = write_folder(plan, tensors, out_dir, assets)
    if problem is not None:
        raise problem
    return student


def require_loadable(config: dict[str, Any]) -> None:
    """Raise UsageError for a configuration that transformers refuses, as some families do with some sizes."""
    try:
        AutoConfig.for_model(**config)
    except (StrictDataclassError, ValueError, TypeError) as error:
        heads, cause = config["num_attention_heads"], str(error).strip().splitlines()[-1].strip()
        raise UsageError(
            f"transformers refuses the config.json of this cut: {cause}",
            "the student could not be loaded",
            f"choose other sizes; most families need a hidden size that is a multiple of the {heads} heads",
            code="cut-not-supported",
        ) from error


def require_width_rules(teacher: ModelShape) -> None:
    """Raise UsageError for a family whose width cannot be cut: it has tensors of other kinds."""
    known = {*IN_GROUPS, *IN_FFN, *UNCUT}
    others = [
        entry
        for entry in FAMILIES[teacher.family].tensors.values()
        if entry.rule not in known and any(exists(entry, layer) for layer in teacher.layers)
    ]
    if others:
        raise UsageError(
            f"mkd cannot cut the width of a {teacher.family} model",
            f"it has tensors such as {others[0].tensors[0]}",
            "cut its layers (--num-layers)",
            code="cut-not-supported",
        )


def cut_tensors(checkpoint: HFCheckpoint, teacher: ModelShape, cut: Cut) -> Iterator[Tensor]:
    """Yield the student's tensors on the CPU, in the order of the export and the dtype on disk."""
    templates = {
        tensor: entry
        for table in (FAMILIES[teacher.family].tensors, MODEL_TABLE)
        for entry in table.values()
        for tensor in entry.tensors
    }
    for name, full in hf_tensor_shapes(cut.shape(teacher)).items():
        number = LAYER_NUMBER.search(name)
        kept = int(number[0]) if number else 0
        source = LAYER_NUMBER.sub(str(cut.layers[kept]), name)
        tensor = checkpoint.read(source, (slice(None),) * len(checkpoint.headers[source].shape))
        if cut.is_narrower:
            template = LAYER_NUMBER.sub("{layer}", name)
            layer = teacher.layers[cut.layers[kept]] if number else None
            tensor = _narrowed(tensor, template, templates[template], teacher, layer, cut, kept)
        if source in cut.norm_factors:
            tensor = (tensor.double() * cut.norm_factors[source]).to(tensor.dtype)
        assert tuple(tensor.shape) == full, (name, tuple(tensor.shape), full)
        yield tensor


def _narrowed(
    tensor: Tensor,
    name: str,  # of the tensor, with {layer}
    entry: Entry,
    teacher: ModelShape,
    layer: LayerShape | None,
    cut: Cut,
    kept: int,  # index of the layer among the kept ones
) -> Tensor:
    """Return the rows and columns of a tensor that stay."""
    rule, dim = entry.rule, entry.rule.dim
    model: Any = teacher  # frozen, unlike the protocol that rules read
    blocks = None
    if rule in IN_GROUPS and cut.groups:
        num_blocks, blocks = teacher.num_query_groups, cut.groups[kept]
        parts = rule.parts(model, layer, 1)
    elif rule in IN_FFN and cut.ffn and layer is not None:
        num_blocks, blocks = layer.ffn_hidden_size, cut.ffn[kept]
        parts = rule.parts(model, layer, num_blocks)  # one channel a rank: blocks of one channel
    if blocks is not None:
        own = [part for part, of in zip(parts, entry.tensors, strict=True) if of == name]
        tensor = tensor.index_select(dim, _kept_indices(own, num_blocks, blocks))
    if cut.hidden and (rule is HIDDEN or tensor.dim() == 2):
        hidden_dim = 0 if rule is HIDDEN else 1 - dim
        tensor = tensor.index_select(hidden_dim, torch.tensor(cut.hidden))
    return tensor


def _kept_indices(parts: list[int], num_blocks: int, blocks: tuple[int, ...]) -> Tensor:
    """Return the indices of the kept `blocks`. A fused tensor has all blocks of its first part first."""
    indices, start = [], 0
    for part in parts:
        first = torch.tensor(blocks)[:, None] * part + start
        indices.append((first + torch.arange(part)).flatten())
        start += num_blocks * part
    return torch.cat(indices)
