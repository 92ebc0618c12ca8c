"""The time of one micro-batch on each pipeline stage, from FLOPs and measured rates.

The teacher costs its forward, the student forward and backward (twice the forward), plus what it recomputes. The last stage
also runs both LM heads and the loss: the fused head makes the gradient during forward, so all of it is forward time there.
Embeddings, norms and communication are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mkd.plan.flops import layer_attention_flops, layer_matmul_parameters
from mkd.plan.layout import PipelineLayout
from mkd.plan.model_shape import ModelShape

DOCUMENT_LENGTH = 1024
"""Tokens of a document where nobody knows better: about what web text has. Attention costs in proportion to it."""


@dataclass(frozen=True)
class Rates:
    """Useful TFLOP/s of one device, in bf16.

    Measured on one H200 (Megatron-core 0.16.1, TE 2.11, torch 2.11+cu130, packs of 8,192 tokens): Qwen3-8B-shaped forward
    200.2 ms with short documents and 235.5 ms with one long one, Qwen3-1.7B-shaped forward + backward 148.5 and 193.7 ms, no
    heads. The difference is attention (490 and 447 TFLOP/s), the rest matrix products. Fused heads: 41 ms for
    2 N V (3 h_s + h_t) = 25.5 TFLOP.
    """

    student_matmul: float = 488.0  # forward and backward, width 2048
    teacher_matmul: float = 583.0  # forward, width 4096
    attention: float = 460.0
    head: float = 620.0


@dataclass(frozen=True)
class StageTime:
    """Milliseconds of one micro-batch on one (pipeline rank, virtual stage)."""

    forward_ms: float  # teacher and student; on the last stage both heads and the gradient of the student's too
    backward_ms: float

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class PairCost:
    """Milliseconds of one micro-batch on one process: one decoder layer of each model, and the heads."""

    student_forward_ms: float
    student_backward_ms: float
    teacher_forward_ms: float  # 0 without a teacher
    head_ms: float  # both heads and the loss, on the last stage

    @property
    def student_ms(self) -> float:
        """One student layer, forward and backward."""
        return self.student_forward_ms + self.student_backward_ms

    def stage_times(self, student: PipelineLayout, teacher: PipelineLayout | None) -> list[StageTime]:
        """The time of every stage, in model order."""
        taught = teacher.layers if teacher else (0,) * len(student.layers)
        times = [
            StageTime(
                learned * self.student_forward_ms + frozen * self.teacher_forward_ms, learned * self.student_backward_ms
            )
            for learned, frozen in zip(student.layers, taught, strict=True)
        ]
        times[-1] = StageTime(times[-1].forward_ms + self.head_ms, times[-1].backward_ms)
        return times


def pair_cost(
    config: Any,
    student: ModelShape,
    teacher: ModelShape | None,
    num_stages: int,  # pipeline ranks x virtual stages
    document_length: int = DOCUMENT_LENGTH,
    rates: Rates | None = None,
) -> PairCost:
    """The cost under an `mkd.config.schema.Config`: its micro-batch, tensor and context parallelism, and recomputation.

    Attention is counted for packs of documents of `document_length` tokens, or of a whole pack if that is shorter. Every token
    counts as a loss token. Block recomputation counts as if stages were equal.
    """
    rates = rates or Rates()
    parallel, training = config.parallel, config.training
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    tokens = training.micro_batch_size * training.seq_length
    squares = tokens * min(document_length, training.seq_length)

    def attention_ms(shape: ModelShape) -> float:
        return _milliseconds(layer_attention_flops(shape, squares) / ranks, rates.attention)

    def layer_ms(shape: ModelShape, rate: float) -> float:
        return _milliseconds(2 * tokens * layer_matmul_parameters(shape) / ranks, rate) + attention_ms(shape)

    forward_ms = layer_ms(student, rates.student_matmul)
    again_ms = attention_ms(student) if training.recompute_granularity == "selective" else 0.0
    if training.recompute_granularity == "full":
        again_ms = _recomputed_share(training, student.num_layers / num_stages) * forward_ms
    head_width = 3 * student.hidden_size + (teacher.hidden_size if teacher else 0)
    return PairCost(
        student_forward_ms=forward_ms,
        student_backward_ms=2 * forward_ms + again_ms,
        teacher_forward_ms=layer_ms(teacher, rates.teacher_matmul) if teacher else 0.0,
        head_ms=_milliseconds(2 * tokens * student.vocab_size * head_width / ranks, rates.head),
    )


def _recomputed_share(training: Any, layers: float) -> float:
    """Proportion (0 to 1) of a stage's `layers` that full recomputation runs again; block takes the first N of each stage."""
    return 1.0 if training.recompute_method == "uniform" else min(training.recompute_num_layers / layers, 1.0)


def _milliseconds(flops: float, tflops_per_s: float) -> float:
    return flops / tflops_per_s / 1e9
