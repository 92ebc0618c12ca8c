"""How one teacher of several, or one that has its own tokens, is compared with the student."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from mkd.config.divergence import DivergenceSettings
from mkd.config.schema import KDConfig, TeacherConfig
from mkd.data.aligned.teacher_batch import TeacherBatch
from mkd.data.batch import PackedBatch
from mkd.losses import HeadInput, KDObjective, build_divergence, fused_linear_kd
from mkd.models.language_model import LanguageModel
from mkd.parallel.context import ParallelContext
from mkd.train.sums import TeacherSums
from mkd.xtoken.fused import fused_chunk_kd
from mkd.xtoken.loss_settings import ChunkLossSettings
from mkd.xtoken.vocabulary.chunk_vocabulary import ChunkVocabulary


@dataclass(frozen=True)
class TeacherLoss:
    """One teacher's part of the loss."""

    name: str
    share: float  # of all teachers' weights; the shares add up to 1
    divergence: dict[
        str, Any
    ]  # fields of `KDObjective` and `ChunkLossSettings`: temperature, its scaling, divergence
    chunk_settings: ChunkLossSettings | None = None  # of a teacher with its own tokens ...
    vocabulary: ChunkVocabulary | None = (
        None  # ... and, where the loss is computed, its vocabulary beside the student's
    )

    @property
    def is_cross_tokenizer(self) -> bool:
        return self.chunk_settings is not None

    @classmethod
    def of_kd(
        cls,
        kd: KDConfig,
        settings: TeacherConfig | None = None,  # what it says goes before what `kd` says
        name: str = "teacher",
        share: float = 1.0,
        vocabulary: ChunkVocabulary | None = None,
    ) -> TeacherLoss:
        """From the configuration."""
        settings = settings or TeacherConfig()
        chosen = DivergenceSettings.from_config(kd, settings)
        temperature = kd.kd_temperature if settings.temperature is None else settings.temperature
        divergence = dict(
            temperature=temperature,
            temperature_scaling=kd.kd_temperature_scaling,
            divergence=build_divergence(chosen.name, chosen.parameter),
        )
        xtoken, chunk_settings = settings.xtoken, None
        if xtoken is not None:
            chunk_settings = ChunkLossSettings(loss=xtoken.loss, top_k=xtoken.top_k, **divergence)
        return cls(name, share, divergence, chunk_settings, vocabulary)


def compare(
    teacher: TeacherLoss,
    context: ParallelContext,
    student_model: LanguageModel,
    teacher_model: LanguageModel,
    hidden: Tensor,  # [t(/tp), 1, h_s] final, of the student
    teacher_hidden: Tensor,  # [t'(/tp), 1, h_t] final, of the teacher
    batch: PackedBatch,
    own: TeacherBatch | None,  # the micro-batch in the teacher's own tokens
    weights: Tensor,  # [k] fp32, of this teacher in each pack
    loss_gradient: Tensor,  # 0-dim, what the loss is multiplied by
    fp32_logits: bool,
) -> tuple[Tensor, TeacherSums]:
    """(sum over rows of weight * s(T) * D, which carries the graph; sums for the report)."""
    common = dict(
        tp_group=context.tp_group,
        sequence_parallel=student_model.config.sequence_parallel,
        loss_gradient=loss_gradient,
        fp32_logits=fp32_logits,
    )

    def on_tokens(student_weight: Tensor, teacher_weight: Tensor):
        row_weights = batch.loss_mask[0] * weights.repeat_interleave(batch.loss_mask.shape[1] // len(weights))
        objective = KDObjective(
            student_vocab_size=student_model.shape.vocab_size,
            teacher_vocab_size=teacher_model.shape.vocab_size,
            kd_ratio=1.0,
            **teacher.divergence,
        )
        output = fused_linear_kd(
            HeadInput(hidden.squeeze(1), student_weight),
            [HeadInput(teacher_hidden.squeeze(1), teacher_weight)],
            batch.labels[0],
            row_weights,
            objective,
            loss_rows=batch.loss_rows,
            **common,
        )
        total, rows = row_weights.sum(), batch.loss_rows.numel()
        sums = (
            output.kd,
            total,
            rows,
            output.teacher_ce,
            output.teacher_entropy,
            total,
            output.top1_agreement,
            total,
        )
        return output.loss, TeacherSums(*sums)

    def on_chunks(student_weight: Tensor, teacher_weight: Tensor):
        chunks = replace(own.chunks, weights=own.chunks.weights * weights[own.chunks.packs])
        output = fused_chunk_kd(
            HeadInput(hidden.squeeze(1), student_weight),
            HeadInput(teacher_hidden.squeeze(1), teacher_weight),
            chunks,
            vocabulary=teacher.vocabulary,
            settings=teacher.chunk_settings,
            cp_group=context.groups.cp if context.cp_size > 1 else None,
            **common,
        )
        tokens, compared = output.num_teacher_tokens, output.num_one_to_one
        sums = (
            output.kd,
            chunks.weights.sum(),
            len(chunks.kinds),
            output.teacher_ce,
            output.teacher_entropy,
            tokens,
        )
        return output.loss, TeacherSums(*sums, output.top1_agreement, compared)

    run = on_chunks if teacher.is_cross_tokenizer else on_tokens
    return use_heads([student_model, teacher_model], run)


def use_heads(models: Sequence[LanguageModel], use: Callable[..., Any]) -> Any:
    """`use(weight of the first model's head, of the second's, ...)`, each lent by its own module."""
    if not models:
        return use()
    first, *others = models
    return first.use_head(lambda weight: use_heads(others, partial(use, weight)))
