"""Handle steps with a NaN or infinite loss or gradient: name the model and the samples, skip or abort."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from mkd.config.schema import Config
from mkd.data.batch import PackedBatch
from mkd.data.dataset import BlendedDataset
from mkd.errors import NonFiniteError
from mkd.operations.event_log import SKIP
from mkd.operations.run_folders import log_folder
from mkd.train.step import Engine, StepResult
from mkd.train.sums import LossSums

WHY = "a NaN or an infinity would destroy the student's weights; no parameter was changed in this step"
DO = (
    "look at these samples with `mkd data preview --samples`, lower --lr, check that the teacher "
    "and student weights are finite, or skip the update of such steps: --non-finite skip"
)
MAX_SHOWN = 16  # sample ids in a message; the files of the log folder have all
LOG = logging.getLogger("mkd")


@dataclass(frozen=True)
class Finding:
    """Knowledge of one rank, or of all ranks together, about a step that was not finite."""

    samples: frozenset[int]  # all samples of the step
    culprits: dict[str, frozenset[int]]  # model -> samples of micro-batches whose logits were not finite
    gradients: tuple[str, ...]  # parameters whose gradient is not finite


@dataclass
class NonFinitePolicy:
    """Checks every step; all ranks have already agreed on a step that was not finite, and skipped it."""

    engine: Engine
    dataset: BlendedDataset
    action: str  # abort or skip
    max_skips: int  # in a row
    file: Path | None  # on rank 0: the findings of every such step, one JSON line each
    skips_in_a_row: int = 0

    @classmethod
    def from_config(cls, config: Config, engine: Engine, dataset: BlendedDataset) -> NonFinitePolicy:
        training, is_first = config.training, engine.context.rank == 0
        file = log_folder(config) / "non_finite.jsonl" if is_first else None
        return cls(engine, dataset, training.non_finite, training.max_non_finite_skips, file)

    def judge(self, iteration: int, result: StepResult, microbatches: Sequence[PackedBatch]) -> None:
        """Accept a finite step. For any other, find the cause and perhaps end the run.

        Finding the cause is collective. Raises NonFiniteError if the step ends the run.
        """
        if result.is_applied:
            self.skips_in_a_row = 0
            return
        self.skips_in_a_row += 1
        findings: list[Finding | None] = [None] * dist.get_world_size()
        dist.all_gather_object(findings, look(self.engine, result, microbatches))
        finding = merge(findings)
        ends = self.action == "abort" or self.skips_in_a_row > self.max_skips
        what = describe(iteration, result, finding)
        self._write(iteration, result, finding, "abort" if ends else "skip")
        if not ends:
            LOG.warning("skipped the update of %s", what, extra={"event": SKIP})
        elif self.action == "abort":
            raise NonFiniteError(what, WHY, DO, code="step-not-finite")
        else:
            what = f"{self.skips_in_a_row} steps in a row were not finite, the last is {what}"
            why = f"--max-non-finite-skips is {self.max_skips}; no parameter was changed in them"
            raise NonFiniteError(what, why, DO, code="step-not-finite")

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
        append_line(self.file, record)


def look(engine: Engine, result: StepResult, microbatches: Sequence[PackedBatch]) -> Finding:
    """Return what this rank knows about the cause.

    The sums of each micro-batch name the model, so no logits are computed again. A teacher's logits are the
    cause if its own entropy is not finite. The student's are the cause if the cross entropy is not finite.
    Without a cross entropy the divergence from a finite teacher decides.
    """
    culprits: dict[str, frozenset[int]] = {}
    for sample_ids, sums in result.reports:
        for name in blamed(sums):
            culprits[name] = culprits.get(name, frozenset()).union(sample_ids)
    samples = frozenset(one for batch in microbatches for one in batch.sample_ids)
    return Finding(samples, culprits, tuple(_bad_gradients(engine)))


def blamed(sums: LossSums) -> list[str]:
    """Return the models whose logits were not finite; [] if all were finite."""
    teachers = [name for name, one in sums.teachers.items() if not math.isfinite(one.entropy + one.ce)]
    found = [f"teacher {name}" for name in teachers]
    divergences = [one.kd for name, one in sums.teachers.items() if name not in teachers]
    if not math.isfinite(sum((*divergences, *sums.auxiliary.values()), sums.ce)):
        found.append("the student")
    if sums.feedback is not None and not math.isfinite(sums.feedback.feedback):
        found.append("the student, or the reference if there is one")
    return found


def merge(findings: Sequence[Finding]) -> Finding:
    """Merge the findings of all ranks."""
    names = sorted({name for one in findings for name in one.culprits})
    nothing = frozenset()
    return Finding(
        nothing.union(*(one.samples for one in findings)),
        {name: nothing.union(*(one.culprits.get(name, nothing) for one in findings)) for name in names},
        tuple(sorted({name for one in findings for name in one.gradients})),
    )


def describe(iteration: int, result: StepResult, finding: Finding) -> str:
    """Describe the step, the models and the samples in one sentence."""
    loss = result.sums.token_sums()["loss"]
    step = f"iteration {iteration}: loss sum {loss}, gradient norm {result.grad_norm}"
    if finding.culprits:
        parts = [f"{name} in sample {shown(samples)}" for name, samples in finding.culprits.items()]
        return f"{step}; logits that are not finite: {', '.join(parts)}"
    first, more = finding.gradients[:1], len(finding.gradients) - 1
    where = f" of {first[0]} and {more} more parameters" if first else ""
    samples = shown(finding.samples)
    return f"{step}; all logits are finite, the gradient{where} is not; samples of the step: {samples}"


def shown(samples: Iterable[int]) -> str:
    """Return `3, 7, 12`, with a count in place of the samples after the first `MAX_SHOWN`."""
    samples = sorted(samples)
    text = ", ".join(map(str, samples[:MAX_SHOWN]))
    return text if len(samples) <= MAX_SHOWN else f"{text} and {len(samples) - MAX_SHOWN} more"


def append_line(file: Path, record: Mapping) -> None:
    """Append one line of JSON."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


def documents_by_sample(dataset: BlendedDataset, samples: Iterable[int]) -> dict[str, dict[str, list[int]]]:
    """Return {sample: {prefix of a corpus: numbers of the documents that it has parts of}}, for JSON."""
    return {str(sample): dataset.documents_of(sample) for sample in sorted(samples)}


def _bad_gradients(engine: Engine) -> list[str]:
    """Return the names of this rank's parameters whose gradient, as kept for the update, is not finite."""
    found = []
    for stage in engine.stages:
        student = get_attr_wrapped_model(stage, "student")
        for name, parameter in student.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None and not torch.isfinite(gradient).all():
                found.append(name)
    return found
