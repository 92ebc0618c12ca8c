"""From a request to a YAML file that runs, and its summary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mkd.checkpoint.hf.hf_folder import PLANNED, is_planned
from mkd.config.load import load_config
from mkd.human import counted, duration, number
from mkd.plan.advice.verdict import fullest_rank
from mkd.plan.forecast import Forecast
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import model_parameters
from mkd.pruning.cut import first_parts
from mkd.recipe.choose import choose_basics, choose_batch
from mkd.recipe.choose_layout import DoesNotFit, choose_layout, put_data_parallel
from mkd.recipe.first_request import Request, have_other_tokens
from mkd.recipe.folder_in_use import check_student, make_folder
from mkd.recipe.recipe_yaml import recipe_text
from mkd.recipe.settings import Settings
from mkd.recipe.survey import survey
from mkd.run_command import mkd_command, quoted

CONFIG = "run.yaml"
LENGTH = "training.seq_length"
SHORTEST = 1024  # pack that is tried on GPUs
CPU_TOKENS, GPU_TOKENS = 2048, 8192  # to measure a cut on


@dataclass(frozen=True)
class FirstRun:
    """A run that has been chosen."""

    request: Request
    settings: Settings
    forecast: Forecast

    @property
    def path(self) -> Path:
        """The YAML file."""
        return self.request.out / CONFIG

    def write(self) -> None:
        """Write the file, and the config.json of a student that is still to be cut. Check both."""
        request = self.request
        make_folder(request.out)
        if request.sizes is not None:
            write_planned_student(request)
        self.path.write_text(recipe_text(self.settings, self.heading()), encoding="utf-8")
        written = load_config(["--config", str(self.path)]).config
        assert written == self.settings.config().with_reference().with_evaluation(), (
            "it reads as it was meant"
        )

    def heading(self) -> str:
        """Return the first lines of the file."""
        request = self.request
        teacher, student = (number(model_parameters(one).total) for one in self.shapes)
        machine = "a CPU" if not request.gpus else counted(request.gpus, "GPU")
        machine += f" of {request.gpu_gib:g} GiB" if request.gpu_gib else ""
        lines = [f"A teacher of {teacher} parameters and a student of {student} on {machine}, by `mkd init`."]
        lines += ["Change what you like. `mkd train --help-all` describes every setting.", ""]
        return "\n".join([*lines, *(f"  {command}" for command in self.commands())])

    @property
    def shapes(self) -> tuple[ModelShape, ModelShape]:
        """Shapes of the teacher and the student."""
        return self.request.teacher_shape, self.request.student_shape

    def commands(self, mkd: str = "mkd") -> list[str]:
        """Return what to do next, as commands."""
        request, config = self.request, quoted(self.path)
        commands = []
        if request.sizes is not None and not (Path(request.student_folder) / "tokenizer.json").exists():
            commands.append(f"{mkd} {' '.join(map(quoted, make_student_words(request)))}    # the student")
        commands.append(f"{mkd} data preview {self.preview_words()}    # what the models read")
        if request.gpus:  # the plan knows GPUs alone
            plan = f"plan --world-size {request.processes} --config {config}"
            commands.append(f"{mkd} {plan}    # time and memory")
        ranks = f" --nproc-per-node {request.gpus}" if request.gpus > 1 else ""
        commands.append(f"{mkd} train{ranks} --config {config} --dry-run    # checks everything")
        commands.append(f"{mkd} train{ranks} --config {config}    # again after a stop: it resumes")
        return commands

    def preview_words(self) -> str:
        """Return the arguments that show the first text as the student reads it."""
        request = self.request
        tokenizer = request.teacher if request.sizes is not None else request.student
        length = str(self.settings.get(LENGTH))
        words = (request.text_files[0], "--student", tokenizer, "--seq-length", length)
        return " ".join(map(quoted, words))

    def summary(self, shows_commands: bool = True) -> str:
        """Return what was chosen, in a few lines, and with `shows_commands` what to do next."""
        forecast, settings = self.forecast, self.settings
        steps = settings.get("training.train_iters")
        lines = [
            forecast.batch.equation(),
            f"{counted(steps, 'step')}: {settings.choices['training.train_iters'].why}",
        ]
        if self.request.gpus:
            rank, gib = fullest_rank(forecast)
            seconds = steps * forecast.planned_step_ms() / 1000
            lines.append(f"predicted on H200s: {duration(seconds)}; {gib:.1f} GiB on the fullest GPU")
        lines += [*self.notes(), f"written: {self.path}"]
        if shows_commands:
            lines += ["next:", *(f"  {one}" for one in self.commands(mkd_command()))]
        return "\n".join(lines)

    def notes(self) -> list[str]:
        """Return what could not be known."""
        request, notes = self.request, []
        if request.sizes is None and have_other_tokens(request.teacher, request.student) is None:
            notes.append(
                "note: whether the models have the same tokens is not known without both tokenizer.json; the "
                "run checks it"
            )
        if request.gpus and request.gpu_gib is None:
            notes.append(
                "note: the memory of a GPU is not known, so nothing was fitted to it: give --gpu-memory-gib"
            )
        return notes


def choose_first_run(request: Request) -> FirstRun:
    """Choose all settings. Raises ErrorList for what cannot be, and UsageError if the pair does not fit."""
    request.check()
    check_student(request)
    text, length = survey(request.data), None
    while True:
        settings = Settings(request.given)
        choose_basics(request, settings, text, length)
        put_data_parallel(request, settings)
        choose_batch(request, settings, text)
        if request.gpu_gib is not None:
            why = "of one GPU: `mkd plan` then says whether it fits"
            settings.put("device_memory_gib", request.gpu_gib, why)
        try:
            return FirstRun(request, settings, choose_layout(request, settings))
        except DoesNotFit:
            length = settings.get(LENGTH) // 2
            if LENGTH in request.given or length < SHORTEST:
                raise


def make_student_words(request: Request) -> list[str]:
    """Return the command line that cuts the student, without `mkd`."""
    sizes, words = request.sizes, ["make-student", "--hf", request.teacher, "--out", request.student_folder]
    assert sizes is not None
    given = {
        "--num-layers": sizes.num_layers,
        "--ffn-hidden-size": sizes.ffn_hidden_size,
        "--num-query-groups": sizes.num_query_groups,
        "--hidden-size": sizes.hidden_size,
        "--target-params": request.student.upper() if sizes.target_params else None,
    }
    words += [word for flag, value in given.items() if value for word in (flag, str(value))]
    tokens = GPU_TOKENS if request.gpus else CPU_TOKENS
    return [*words, "--data-path", *request.text_files, "--tokens", str(tokens)]


def write_planned_student(request: Request) -> None:
    """Write config.json and tokenizer of the student to cut, so that it can be planned; no weights yet.

    A student that has been cut stays as it is: `check_student` has compared its sizes.
    """
    folder, sizes = Path(request.student_folder), request.sizes
    assert sizes is not None
    if (folder / "config.json").exists() and not is_planned(folder):
        return
    teacher = request.teacher_shape
    config = first_parts(sizes.resolve(teacher)[0], teacher).config(teacher) | {PLANNED: True}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
