"""Find the files of one model, and read its shape and tensor headers without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mkd.checkpoint.folders import HF_FOLDER, find_weights, require_same_model
from mkd.checkpoint.hf.hf_check import check_hf_checkpoint
from mkd.checkpoint.hf.hf_hub import resolve_hf
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.config.schema import StudentConfig, TeacherConfig
from mkd.errors import MkdError
from mkd.plan.models.model_shape import ModelShape


@dataclass(frozen=True)
class ModelSource:
    """Shape, small files and weights of one model on disk."""

    shape: ModelShape
    assets: Path  # folder with config.json and, usually, tokenizer files
    hf: HFCheckpoint | None  # weights in a Hugging Face folder; None: they are in `load`
    load: Path | None  # Megatron checkpoint folder with the weights; None: they are in `hf`

    def weight_files(self, pattern: str = "*") -> list[Path]:
        """Return config.json and the files of the weights; in a Megatron folder, those of `pattern`."""
        if self.hf is None:
            files = sorted(path for path in self.load.glob(pattern) if path.is_file())
        else:
            names = {header.file for header in (*self.hf.headers.values(), *self.hf.tower.values())}
            files = [self.hf.directory / name for name in sorted(names)]
        return [self.assets / "config.json", *files]


def locate_model(
    problems: list[MkdError], role: str, source: StudentConfig | TeacherConfig
) -> ModelSource | None:
    """Return the model of `source`; None if it names none, or after adding an error to `problems`."""
    if not (source.hf or source.load):
        return None
    try:
        if source.load is None:
            folder = resolve_hf(source.hf)
            shape, checkpoint = ModelShape.from_hf_dir(folder), HFCheckpoint(folder)
            check_hf_checkpoint(shape, checkpoint)
            return ModelSource(shape, folder, checkpoint, None)
        folder = find_weights(role, source)
        assets = resolve_hf(source.hf) if source.hf else folder / HF_FOLDER
        shape = ModelShape.from_hf_dir(assets)
        require_same_model(folder, shape)
        return ModelSource(shape, assets, None, folder)
    except MkdError as error:
        problems.append(error)
        return None
