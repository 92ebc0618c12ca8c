"""Compare the tensors of a Hugging Face folder with its config.json, from headers only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mkd.checkpoint.hf.hf_causes import FLOAT_DTYPES, common_causes
from mkd.checkpoint.hf.hf_names import carried_names, hf_tensor_shapes
from mkd.checkpoint.hf.hf_quantised import TensorHeader
from mkd.checkpoint.hf.hf_reader import DERIVED_TENSOR, HFCheckpoint
from mkd.errors import CheckpointError, raise_all
from mkd.families.weight_rules import EMBEDDING, LAYER_TENSOR, LM_HEAD
from mkd.plan.models.model_shape import ModelShape

CHECK_CONFIG = "check config.json against the weights"


def check_hf_checkpoint(shape: ModelShape, checkpoint: HFCheckpoint) -> None:
    """Compare names, shapes and dtypes on disk with `shape`, from headers only.

    If one cause explains many differences, raise that alone. Otherwise raise `ErrorList` with every problem.
    """
    expected, carried = hf_tensor_shapes(shape), set(carried_names(shape, checkpoint.headers))
    found = {name: one for name, one in checkpoint.headers.items() if name not in carried}
    allowed = {LM_HEAD: expected[EMBEDDING]} if shape.tie_word_embeddings else {}
    where, problems = checkpoint.directory, []
    raise_all(common_causes(str(where), shape.hf_config, expected, found, checkpoint.is_sharded))
    for name in expected.keys() - found.keys():
        what, do = f"{where}: tensor {name} is missing", "download the model again"
        if name == LM_HEAD:
            do += ", or set tie_word_embeddings to true in config.json if the head shares the embedding"
        why = "config.json calls for it"
        problems.append(CheckpointError(what, why, do, code="hf-files-damaged"))
    why = f"a {shape.family} model with this config.json has none: leaving it out changes the model"
    for name in found.keys() - expected.keys() - allowed.keys():
        if not DERIVED_TENSOR.fullmatch(name):
            what = f"{where}: tensor {name} is not expected"
            problems.append(CheckpointError(what, why, CHECK_CONFIG, code="hf-tensor-unexpected"))
    for name, full in (expected | allowed).items():
        problems += _header_problems(where, name, full, found.get(name))
    raise_all(sorted(problems, key=str))


def _header_problems(
    where: Path, name: str, full: tuple[int, ...], header: TensorHeader | None
) -> Iterator[CheckpointError]:
    if header is None:
        return
    if header.shape != full:
        what = f"{where}: tensor {name} has shape {list(header.shape)}, expected {list(full)}"
        yield CheckpointError(what, "config.json gives the sizes", CHECK_CONFIG, code="hf-tensor-unexpected")
    if header.dtype not in FLOAT_DTYPES:
        what = f"{where}: tensor {name} is stored as {header.dtype}"
        why = f"mkd reads {', '.join(sorted(FLOAT_DTYPES))}, and quantised weights that config.json describes"
        do = "use the original checkpoint of this model"
        yield CheckpointError(what, why, do, code="hf-quantisation-not-supported")


def layer_of(tensor: str) -> int | None:
    """Return the layer index in a Hugging Face tensor name; None outside the layers."""
    match = LAYER_TENSOR.match(tensor)
    return None if match is None else int(match.group(1))
