"""Words for what a signal would do at this moment of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mkd.checkpoint.folders import iteration_folder
from mkd.human import counted
from mkd.operations.phases import END, EVAL, INIT, SAVE, TASK_EVALUATION, Follower
from mkd.operations.signals import Signals

SAVED = "after_pointer"  # the moment of a save from which a run could resume


@dataclass
class StopNotice(Follower):
    """Keeps the texts of `signals` up to date, so that a thread can print them at any time."""

    signals: Signals
    save: str | None  # folder of checkpoints; None: the run saves nothing
    kept_iteration: int = 0  # of `kept_in`
    kept_in: Path | None = None  # the checkpoint from which it could resume

    def entered(self, phase: str, iteration: int) -> None:
        """Describe a stop during `phase` of step `iteration`."""
        if phase == INIT:
            return
        then = ", then saving" if self.save else "; --no-save: nothing is saved"
        if phase == SAVE:
            self.signals.notice = f"stopping when iteration {iteration} is saved"
        elif phase in (EVAL, TASK_EVALUATION):
            self.signals.notice = f"stopping after this batch of the evaluation{then}"
        elif phase == END:
            self.signals.notice = "the training is over: the run ends after its last files are written"
        else:
            self.signals.notice = f"stopping after step {iteration}{then}"
        steps = iteration - self.kept_iteration
        self.signals.lost = f" and lose {counted(steps, 'step')}" if steps > 0 else ""
        self._describe_kept()

    def passed(self, moment: str, iteration: int) -> None:
        """Notice that a checkpoint is complete."""
        if moment == SAVED and self.save:
            self.keep(iteration_folder(Path(self.save), iteration), iteration)

    def keep(self, folder: Path, iteration: int) -> None:
        """Remember the checkpoint from which the run resumes, or that it has just saved."""
        self.kept_in, self.kept_iteration = folder, iteration
        self._describe_kept()

    def _describe_kept(self) -> None:
        is_kept, folder = self.kept_in is not None, self.kept_in or Path()
        text = f"{folder} is saved: --load {folder.parent} resumes there"
        self.signals.kept = text if is_kept else "nothing of this run is saved"
