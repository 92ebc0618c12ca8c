"""Steps whose loss or gradient is NaN or infinite: which model and which samples, and whether the run goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from mkd.config.schema import Config
from mkd.data.batch import PackedBatch
from mkd.data.dataset import BlendedDataset
from mkd.errors import NonFiniteError
from mkd.operations.folders import log_folder
from mkd.train.samples import documents_by_sample, shown
from mkd.train.step import Engine, StepResult
from mkd.train.sums import LossSums

WHY = "a NaN or an infinity would destroy the student's weights; no parameter was changed in this step"
DO = (
    "look at these samples with tools/inspect_data.py --samples, lower --lr, check that the teacher and student weights are "
    "finite, or let such steps pass without an update: --non-finite skip"
)


@dataclass(frozen=True)
class Finding:
    """What one rank, or all together, know of a step that was not finite."""

    samples: frozenset[int]  # of the step
    culprits: dict[
        str, frozenset[int]
    ]  # model -> samples of the micro-batches in which its logits were not finite
    gradients: tuple[str, ...]  # parameters whose gradient is not finite


@dataclass
class NonFinitePolicy:
    """Asked after every step. All ranks have agreed on it, and have left out its update, when a step was not finite."""

    engine: Engine
    dataset: BlendedDataset
    action: str  # abort or skip
    max_skips: int  # in a row
    file: Path | None  # on rank 0: what was found in every such step, a JSON line each
    note: Callable[[str], None]
    skips_in_a_row: int = 0

    @classmethod
    def of(
        cls, config: Config, engine: Engine, dataset: BlendedDataset, note: Callable[[str], None]
    ) -> NonFinitePolicy:
        training, is_first = config.training, engine.context.rank == 0
        file = log_folder(config) / "non_finite.jsonl" if is_first else None
        return cls(engine, dataset, training.non_finite, training.max_non_finite_skips, file, note)

    def judge(self, iteration: int, result: StepResult, microbatches: Sequence[PackedBatch]) -> None:
        """Nothing after a good step. Collective after a bad one, and raises NonFiniteError on all ranks if it ends the run."""
        if result.is_applied:
            self.skips_in_a_row = 0
            return
        self.skips_in_a_row += 1
        finding = merge(_gather(look(self.engine, result, microbatches)))
        ends = self.action == "abort" or self.skips_in_a_row > self.max_skips
        what = describe(iteration, result, finding)
        self._write(iteration, result, finding, "abort" if ends else "skip")
        if not ends:
            self.note(f"skipped the update of {what}")
        elif self.action == "abort":
            raise NonFiniteError(what, WHY, DO)
        else:
            what = f"{self.skips_in_a_row} steps in a row were not finite, the last is {what}"
            raise NonFiniteError(
                what, f"--max-non-finite-skips is {self.max_skips}; no parameter was changed in them", DO
            )

    def _write(self, iteration: int, result: StepResult, finding: Finding, action: str) -> None:
        if self.file is None:
            return
        record = {
            "iteration": iteration,
            "action": action,
            "loss": str(result.sums.token_sums()["loss"]),  # JSON has no NaN
            "grad_norm": str(result.grad_norm),
            "culprits": {name: sorted(samples) for name, samples in finding.culprits.items()},
            "gradients": finding.gradients,
            "sample_ids": sorted(finding.samples),
            "documents": documents_by_sample(self.dataset, finding.samples),
        }
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def look(engine: Engine, result: StepResult, microbatches: Sequence[PackedBatch]) -> Finding:
    """What this rank knows. The sums of each micro-batch say which model it was: no logits are computed again.

    A teacher's logits are to blame where its own entropy is not finite, and the student's where the cross entropy or, without
    any, the divergence from a finite teacher is not.
    """
    culprits: dict[str, set[int]] = {}
    for sample_ids, sums in result.reports:
        for name in blamed(sums):
            culprits.setdefault(name, set()).update(sample_ids)
    return Finding(
        frozenset(one for batch in microbatches for one in batch.sample_ids),
        {name: frozenset(samples) for name, samples in culprits.items()},
        tuple(_bad_gradients(engine)),
    )


def blamed(sums: LossSums) -> list[str]:
    """The models whose logits were not finite; [] if all were."""
    teachers = [name for name, one in sums.teachers.items() if not math.isfinite(one.entropy + one.ce)]
    found = [f"teacher {name}" for name in teachers]
    divergences = [one.kd for name, one in sums.teachers.items() if name not in teachers]
    if not math.isfinite(sum((*divergences, *sums.auxiliary.values()), sums.ce)):
        found.append("the student")
    return found


def merge(findings: Sequence[Finding]) -> Finding:
    """Of all ranks."""
    names = sorted({name for one in findings for name in one.culprits})
    nothing = frozenset()
    return Finding(
        nothing.union(*(one.samples for one in findings)),
        {name: nothing.union(*(one.culprits.get(name, nothing) for one in findings)) for name in names},
        tuple(sorted({name for one in findings for name in one.gradients})),
    )


def describe(iteration: int, result: StepResult, finding: Finding) -> str:
    """One sentence: the step, who, which samples."""
    loss = result.sums.token_sums()["loss"]
    step = f"iteration {iteration}: loss sum {loss}, gradient norm {result.grad_norm}"
    if finding.culprits:
        parts = [f"{name} in sample {shown(samples)}" for name, samples in finding.culprits.items()]
        return f"{step}; logits that are not finite: {', '.join(parts)}"
    where = (
        f" of {finding.gradients[0]} and {len(finding.gradients) - 1} more parameters"
        if finding.gradients
        else ""
    )
    return f"{step}; all logits are finite, the gradient{where} is not; samples of the step: {shown(finding.samples)}"


def _bad_gradients(engine: Engine) -> list[str]:
    """Names of this rank's parameters whose gradient, as it is kept for the update, is not finite."""
    found = []
    for chunk in engine.chunks:
        student = get_attr_wrapped_model(chunk, "student")
        for name, parameter in student.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None and not torch.isfinite(gradient).all():
                found.append(name)
    return found


def _gather(finding: Finding) -> list[Finding]:
    gathered: list[Finding | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, finding)
    return gathered
