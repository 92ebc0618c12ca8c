"""The time of one micro-batch on each pipeline stage, from FLOPs and measured rates.

Each teacher costs its forward. The student costs forward and backward (twice the forward), plus what it
recomputes. The last stage also runs the LM heads and the loss. The fused head computes the gradient during
forward, so all of it is forward time there. Embeddings, norms and communication are not counted; `Forecast`
adds copies from and to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mkd.config.schema import Config, TrainingConfig
from mkd.plan.flops import layer_attention_flops, matmul_parameters
from mkd.plan.layout import PipelineLayout
from mkd.plan.model_shape import ModelShape
from mkd.plan.planned_teachers import Teacher, plan_teachers

DOCUMENT_LENGTH = 1024
"""Default length of a document in tokens, about that of web text. Attention costs in proportion to it."""

HOST_BYTES_PER_MS = 50e6
"""Bandwidth of page-locked memory over PCIe 5 x16: 63 GB/s as specified, about 50 in practice."""


@dataclass(frozen=True)
class Rates:
    """Useful TFLOP/s of one device, in bf16.

    Measured on one H200 (Megatron-core 0.16.1, TE 2.11, torch 2.11+cu130, packs of 8,192 tokens):

        Qwen3-8B-shaped forward                 200.2 ms with short documents, 235.5 ms with one long one
        Qwen3-1.7B-shaped forward + backward    148.5 ms and 193.7 ms, no heads
        fused heads                             41 ms for 2 N V (3 h_s + h_t) = 25.5 TFLOP

    The difference of each pair is attention (490 and 447 TFLOP/s), the rest matrix products.
    """

    student_matmul: float = 488.0  # forward and backward, width 2048
    teacher_matmul: float = 583.0  # forward, width 4096
    attention: float = 460.0
    head: float = 620.0


@dataclass(frozen=True)
class StageTime:
    """Milliseconds of one micro-batch on one (pipeline rank, virtual stage)."""

    # Teachers and student. The last stage adds the heads and the gradient of the student's head.
    forward_ms: float
    backward_ms: float

    @property
    def total_ms(self) -> float:
        """Time of forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class PairCost:
    """Milliseconds of a micro-batch on one process: each model's average layer, and the heads."""

    student_forward_ms: float
    student_backward_ms: float
    teacher_forward_ms: tuple[float, ...]  # one for each teacher
    head_ms: float  # all heads and the loss, on the last stage

    @property
    def student_ms(self) -> float:
        """Time of one student layer, forward and backward."""
        return self.student_forward_ms + self.student_backward_ms

    def stage_times(self, student: PipelineLayout, teachers: Sequence[PipelineLayout]) -> list[StageTime]:
        """Return the time of every stage, in model order."""
        times = []
        for stage, layers in enumerate(student.layers):
            frozen = zip(teachers, self.teacher_forward_ms, strict=True)
            frozen_ms = sum(layout.layers[stage] * ms for layout, ms in frozen)
            forward_ms = layers * self.student_forward_ms + frozen_ms
            times.append(StageTime(forward_ms, layers * self.student_backward_ms))
        times[-1] = StageTime(times[-1].forward_ms + self.head_ms, times[-1].backward_ms)
        return times


def pair_cost(
    config: Config,
    student: ModelShape,
    teachers: Sequence[ModelShape],
    num_stages: int,  # pipeline ranks x virtual stages
    document_length: int = DOCUMENT_LENGTH,
    rates: Rates | None = None,
) -> PairCost:
    """Return the cost of a micro-batch under the parallel sizes and the recomputation of `config`.

    Attention is counted for documents of `document_length` student tokens, or of a whole pack if that is
    shorter. Documents of a cross-tokenizer teacher are longer or shorter in proportion to its packs. Every
    token counts as a loss token. Block recomputation is counted as if stages were equal.
    """
    rates = rates or Rates()
    parallel, training = config.parallel, config.training
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size

    def attention_ms(shape: ModelShape, seq_length: int) -> float:
        document = min(document_length / training.seq_length, 1.0) * seq_length
        flops = layer_attention_flops(shape, round(training.micro_batch_size * seq_length * document))
        return _milliseconds(flops / ranks, rates.attention)

    def layer_ms(shape: ModelShape, seq_length: int, rate: float) -> float:
        flops = 2 * training.micro_batch_size * seq_length * matmul_parameters(shape) / shape.num_layers
        return _milliseconds(flops / ranks, rate) + attention_ms(shape, seq_length)

    planned = plan_teachers(config, teachers)
    forward_ms, again_ms = layer_ms(student, training.seq_length, rates.student_matmul), 0.0
    if training.recompute_granularity == "selective":
        again_ms = attention_ms(student, training.seq_length)
    elif training.recompute_granularity == "full":
        again_ms = _recomputed_share(training, student.num_layers / num_stages) * forward_ms
    teachers_ms = tuple(layer_ms(one.shape, one.seq_length, rates.teacher_matmul) for one in planned)
    head_flops = training.micro_batch_size * _head_flops(config, student, planned) / ranks
    head_ms = _milliseconds(head_flops, rates.head)
    return PairCost(forward_ms, 2 * forward_ms + again_ms, teachers_ms, head_ms)


def _head_flops(config: Config, student: ModelShape, teachers: Sequence[Teacher]) -> int:
    """Count the FLOPs of the heads for one pack.

    The student's head runs with both gradients (3 products) in every pass, each teacher's head once. A single
    divergence over the student's tokens (an average of teachers is one) shares its pass with the cross
    entropy. Otherwise the cross entropy and each teacher have separate passes. Weights that depend on the
    pack read every teacher's logits a second time.
    """
    kd, has_own = config.kd, any(teacher.is_cross_tokenizer for teacher in teachers)
    divergences = min(len(teachers), 1) if kd.averages_teachers else len(teachers)
    passes = 1 if divergences < 2 and not has_own else divergences + (kd.kd_ratio < 1)
    reads = 2 if len(teachers) > 1 and kd.weighs_packs else 1
    total = 6 * passes * config.training.seq_length * student.vocab_size * student.hidden_size
    for teacher in teachers:
        vocab_size = teacher.shape.vocab_size if teacher.is_cross_tokenizer else student.vocab_size
        total += 2 * reads * teacher.seq_length * vocab_size * teacher.shape.hidden_size
    return total


def _recomputed_share(training: TrainingConfig, layers: float) -> float:
    """Return the proportion (0 to 1) of a stage's `layers` that full recomputation runs again."""
    if training.recompute_method == "uniform":
        return 1.0
    number = training.recompute_num_layers
    assert number is not None, "check_recomputation requires it for full recomputation"
    return min(number / layers, 1.0)


def _milliseconds(flops: float, tflops_per_s: float) -> float:
    return flops / tflops_per_s / 1e9
