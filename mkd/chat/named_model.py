"""Find the model that a command line names: a Hugging Face folder, a hub id, a checkpoint or a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mkd.checkpoint.folders import holds_checkpoints
from mkd.checkpoint.hf.hf_folder import is_planned
from mkd.config.load import read_saved_config
from mkd.config.schema import Config, ParallelConfig, StudentConfig, TeacherConfig, TrainingConfig
from mkd.errors import CheckpointError
from mkd.tokenizers.chat_input import ChatSettings

CONFIG = "config.json"
RUN_CONFIG = "config.yaml"


@dataclass(frozen=True)
class ModelsRequest:
    """The models that a command line names."""

    student: str  # folder or hub id
    teacher: str | None = None
    dtype: str | None = None  # bf16 or fp32; None: bf16 on a GPU, else fp32
    tokenizer_model: str | None = None  # tokenizer of the student; None: that in its folder
    chat: ChatSettings = field(default_factory=ChatSettings)

    def config(self, num_ranks: int, is_cuda: bool) -> Config:
        """Return the settings of both models, which all ranks share. Raises CheckpointError."""
        teachers = (teacher_named(self.teacher),) if self.teacher else ()
        bf16 = self.dtype == "bf16" if self.dtype else is_cuda
        return Config(
            student=student_named(self.student),
            teachers=teachers,
            # Sequence-parallel, because a model with experts has to be.
            parallel=ParallelConfig(tensor_model_parallel_size=num_ranks, sequence_parallel=num_ranks > 1),
            training=TrainingConfig(bf16=bf16),
        )


def student_named(name: str) -> StudentConfig:
    """Return the settings of the student `name`. Raises CheckpointError for a folder without a model."""
    folder = _checkpoints(name)
    return StudentConfig(hf=name) if folder is None else StudentConfig(load=str(folder))


def teacher_named(name: str) -> TeacherConfig:
    """Return the settings of the teacher `name`. Raises CheckpointError for a folder without a model."""
    folder = _checkpoints(name)
    return TeacherConfig(hf=name) if folder is None else TeacherConfig(load=str(folder))


def _checkpoints(name: str) -> Path | None:
    """Return the folder of Megatron checkpoints that `name` means; None for a model of Hugging Face.

    A run is named by its log folder. Its checkpoints take precedence over its export.
    """
    folder = Path(name).expanduser()
    if (folder / CONFIG).is_file():
        if is_planned(folder) and not list(folder.glob("*.safetensors")):
            raise CheckpointError(
                f"{name} is only planned: it has no weights",
                "`mkd init` has written its config.json for the plan of a run",
                "cut it with `mkd make-student`, or let `mkd distill` do everything",
                code="hf-weights-missing",
            )
        return None
    if not folder.is_dir():
        return None
    if holds_checkpoints(folder):
        return folder
    places = list(_saved_by_run(folder))
    for place in places:
        if holds_checkpoints(place):
            return place
    looked = f"; the run saves to {places[0]}, where there is none yet" if places else ""
    raise CheckpointError(
        f"{name} holds no model",
        f"it has neither {CONFIG} nor a checkpoint{looked}",
        "name an exported folder, a folder of --save, one iter_* folder in it, or the log folder of a run",
        code="checkpoint-missing",
    )


def _saved_by_run(folder: Path) -> Iterator[Path]:
    """Yield where the run with this log folder may have saved, also if everything has been moved."""
    path = folder / RUN_CONFIG
    if not path.is_file():
        return
    for one in read_saved_config(path):
        if one.path == "checkpoint.save" and isinstance(one.value, str):
            yield Path(one.value)
            yield folder / Path(one.value).name
