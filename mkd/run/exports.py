"""Write the student of a run as Hugging Face folders, at its end."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mkd.checkpoint.hf.hf_rounded import RoundedFiles
from mkd.checkpoint.hf.hf_writer import export_hf
from mkd.checkpoint.hf.peft_writer import export_peft
from mkd.checkpoint.own_exports import OwnExports
from mkd.operations.console import LOG
from mkd.operations.run_folders import export_in_the_way
from mkd.plan.models.lora_shape import LoRAShape
from mkd.release.card_file import with_card
from mkd.release.model_card import ModelCard, title_of
from mkd.release.training_record import TrainingRecord
from mkd.run.loop import Run
from mkd.tokenizers.tokenizer_files import warn_of_export


def export_student(current: Run, folder: Path, logs: Path) -> None:
    """Write the student as a Hugging Face folder with a model card, and list its files in --save."""
    models, assets, checkpoint = current.state.models, current.plan.assets, current.config.checkpoint
    context = current.engine.context
    if context.rank == 0:
        name, step = title_of(folder, checkpoint.push_to_hub), current.position.iteration
        assets = with_card(assets, ModelCard(name, TrainingRecord.read(logs), assets.model, step), folder)
    parts = [(part, part.first_layer) for part in models]
    record = partial(OwnExports(Path(checkpoint.save)).record, folder) if checkpoint.save else None
    optimizer = current.engine.optimizer
    with current.engine.parameters_gathered(), optimizer.exact_weights():
        entry = current.engine.rounding_entry()
        files = RoundedFiles.of_entry(parts, models[0].shape, entry, context)
        export_hf(
            parts,
            models[0].shape,
            folder,
            context=context,
            assets=assets,
            in_the_way=partial(export_in_the_way, checkpoint),
            record=record,
            rounded=files,
        )
    LOG.info("exported the student to %s", folder)
    if context.rank == 0:
        warn_of_export(str(folder))


def export_adapters(current: Run, folder: Path) -> None:
    """Write the student's adapters as a folder of PEFT. Collective."""
    parts, student = [(part, part.first_layer) for part in current.state.models], current.config.student
    lora = LoRAShape.of(current.config)
    assert lora is not None, "--export-lora needs --lora-rank"
    base = student.hf or str(current.plan.student.assets)
    shape, context = current.plan.student.shape, current.engine.context
    with current.engine.parameters_gathered():
        export_peft(parts, shape, folder, context=context, lora=lora, base=base)
    LOG.info("exported the adapters to %s", folder)
