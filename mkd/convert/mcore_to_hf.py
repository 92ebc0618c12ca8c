"""Conversion of a Megatron checkpoint to a Hugging Face folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from mkd.checkpoint.adapters import saved_adapters, saved_base
from mkd.checkpoint.distributed import TrainingState, load_checkpoint
from mkd.checkpoint.folders import HF_FOLDER, iteration_of, read_state
from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_carried import carried_bytes, has_weights
from mkd.checkpoint.hf.hf_changes import SavedProcessor, SavesFiles, StopIds
from mkd.checkpoint.hf.hf_folder import model_in_the_way
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.checkpoint.hf.hf_rounded import RoundedFiles
from mkd.checkpoint.hf.hf_weights import load_tower
from mkd.checkpoint.hf.hf_writer import export_hf
from mkd.checkpoint.hf.peft_writer import export_peft
from mkd.checkpoint.saved_tower import lacks_tower
from mkd.checkpoint.verifying import verify
from mkd.convert.conversion_checks import locate, require_room_for_export
from mkd.convert.models import DTYPES, build_context, build_model, load_from_hf
from mkd.errors import MkdError, collect_error
from mkd.models.language_model import LanguageModel
from mkd.models.lora import Adapted
from mkd.parallel.agreement import agree
from mkd.parallel.context import ParallelContext
from mkd.plan.models.lora_shape import is_factor
from mkd.plan.models.model_shape import ModelShape
from mkd.release.card_file import with_card
from mkd.release.gguf_file import GGUFFile
from mkd.release.hub_push import HubRepository
from mkd.release.model_card import ModelCard, title_of
from mkd.release.training_record import TrainingRecord
from mkd.tokenizers.tokenizer_files import has_tokenizer, warn_of_export

EMBEDDING = "embedding.word_embeddings.weight"  # of every part of a model with all weights


def assets_of(folder: Path, reference: Path) -> HFAssets:
    """Return the small files of an export: the reference's configuration, and what the run has changed.

    The student has learned with the tokenizer, the stop ids and the image processor of the checkpoint.
    """
    own = folder / HF_FOLDER
    if own == reference:
        return HFAssets.of(own)
    stops = StopIds.of_folder(own)
    changes: list[SavesFiles] = [SavedProcessor(own), *([stops] if stops.ids else [])]
    return HFAssets(reference, own if has_tokenizer(own) else reference, tuple(changes))


def saved_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of a checkpoint's embedding, which all weights share, or of its adapters.

    It is fp32 if the checkpoint has neither.
    """
    tensors = dist_checkpointing.load_tensors_metadata(str(folder))
    found = [one for name, one in tensors.items() if is_factor(name) and not name.startswith("optimizer")]
    found = [tensors[EMBEDDING]] if EMBEDDING in tensors else found
    return found[0].dtype if found else torch.float32


def load_model(
    folder: Path, reference: Path, shape: ModelShape, dtype: torch.dtype, context: ParallelContext
) -> LanguageModel:
    """Return this rank's part of the model in a verified checkpoint. Collective.

    If the checkpoint holds adapters alone, their base comes from `reference`.
    """
    lora = saved_adapters(folder)
    if lora is not None:
        model = load_from_hf(reference, shape, dtype, context, lora)
        for module in model.modules() if lora.is_rounded else ():
            if isinstance(module, Adapted):
                module.round_weight()
        load_checkpoint(folder, TrainingState([model], holds=is_factor), context, is_verified=True)
        return model
    model = build_model(shape, dtype, context)
    has_tower = load_missing_tower(model, folder, reference)
    load_checkpoint(folder, TrainingState([model]), context, is_verified=True, has_tower=has_tower)
    return model


def load_missing_tower(model: LanguageModel, folder: Path, reference: Path) -> bool:
    """Fill this rank's tower from `reference` if the checkpoint in `folder` has none. Collective.

    Return True if it has been filled. If one rank finds a tensor that cannot be used, all raise its error.
    """
    is_filled = lacks_tower(folder, [model]) and has_weights(reference)
    problems: list[MkdError] = []
    if is_filled:
        with torch.no_grad():
            collect_error(problems, lambda: load_tower(model, HFCheckpoint(reference)))
    agree(problems[0] if problems else None)
    return is_filled


def card_of(
    folder: Path, logs: Path | None, reference: Path, out: Path, gguf: GGUFFile | None, repository: str | None
) -> ModelCard:
    """Return the card of an export: of the run that logs to `logs`, up to the checkpoint `folder`."""
    step = iteration_of(folder)
    commands = [("A GGUF file of it was made with llama.cpp", gguf.shown(out))] if gguf else []
    record = TrainingRecord.read(logs or folder.parent, step)
    return ModelCard(title_of(out, repository), record, reference, step, commands)


def run(
    load: Path,
    ckpt_step: int | None,
    hf_out: Path,
    reference_hf: str | None,
    dtype: str | None,
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    overwrite: bool = False,
    lora_out: Path | None = None,
    push_to_hub: str | None = None,
    gguf: Path | None = None,
    gguf_type: str = "auto",
    log_dir: Path | None = None,
) -> None:
    """Load a checkpoint at the given layout and export it to `hf_out`. Arguments are the tool's flags.

    They are those that `conversion_checks` has accepted. Raises CheckpointError if `load` has no intact
    checkpoint, and UsageError if `hf_out` holds a model and `overwrite` is False.
    """
    folder, reference = locate(load, ckpt_step, reference_hf)
    shape = ModelShape.from_hf_dir(reference)
    require_room_for_export(hf_out, shape, dtype, carried_bytes(shape, reference))
    context = build_context(tensor_model_parallel_size, pipeline_model_parallel_size)
    verify(folder, context, print)  # before anything is unpickled
    weights = DTYPES[dtype] if dtype else saved_dtype(folder)
    model = load_model(folder, reference, shape, weights, context)
    assets, gguf_file = assets_of(folder, reference), GGUFFile(gguf, gguf_type) if gguf else None
    if context.rank == 0:
        card = card_of(folder, log_dir, reference, hf_out, gguf_file, push_to_hub)
        assets = with_card(assets, card, hf_out)
    in_the_way = None if overwrite else partial(model_in_the_way, "--hf-out", hf_out)
    parts = [(model, model.first_layer)]
    rounded = RoundedFiles.of_entry(parts, shape, read_state(folder), context)
    given: dict[str, Any] = dict(context=context, assets=assets, in_the_way=in_the_way, rounded=rounded)
    export_hf(parts, shape, hf_out, **given)
    if lora_out is not None:
        lora, base = saved_adapters(folder), saved_base(folder)
        assert lora is not None, "the checks have found adapters"
        export_peft(parts, shape, lora_out, context=context, lora=lora, base=base)
    if context.rank == 0:
        name = rounded.rounding.format if rounded else str(weights).removeprefix("torch.")
        print(f"exported {folder} as {name} to {hf_out}")
        warn_of_export(str(hf_out))
    context.leave()
    if context.rank == 0 and gguf_file:
        gguf_file.write(hf_out)
        print(f"wrote {gguf}")
    if context.rank == 0 and push_to_hub:
        print(f"uploaded to {HubRepository(push_to_hub).push(hf_out)}")
