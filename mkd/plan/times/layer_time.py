"""The time of one micro-batch in each layer of a model, from FLOPs and measured rates.

Embeddings, norms and launches of kernels are not counted. The collectives of tensor and context parallelism
count where nothing hides them (collectives.py). A layer with experts costs the products of a token's experts,
which take longer than others, the exchange between processes (collectives.py), in forward the host's wait for
its sizes, and copies of rows: they are sorted by expert and back, before and after each exchange. Backward
copies and exchanges as much as forward, and adds the gradients of all experts of the process to their
buffers. (Other layers add theirs inside the products, whose rate has it.) Nothing hides an exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.schema import Config, TrainingConfig
from mkd.families.layer_shape import LayerShape
from mkd.plan.models.flops import (
    expert_parameters,
    layer_matmul_parameters,
    layer_mixing_flops,
    mlp_parameters,
)
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.stored_experts import matrix_weights
from mkd.plan.parallel_sizes import Sizes
from mkd.plan.times.collectives import ModelCollectives, exchange_ms

ROW_COPIES = 8
"""Times that forward reads or writes the rows of a layer's experts: two copies on each side of them."""

EXPERT_PRODUCTS = 1.6
"""Time of the products of experts, and of what is between them, over that of as many FLOPs elsewhere.

Measured as the rest of a step with EP 2 on H200s; EP 4 on H100s agrees (docs/performance.md, "Four GPUs").
"""

COUNTS_MS = 1.1
"""Time in which the device has nothing to do while the host waits for the sizes of an exchange: 27 of 320 ms
with 24 of them, in the same step."""

ADDED_BYTES = 8
"""Bytes of a gradient's buffer that an addition reads and writes, beside the gradient itself: fp32."""

FP32_PRODUCTS, FP32_ATTENTION = 50.0, 38.0
"""TFLOP/s of fp32, see `Rates.of_precision`."""


@dataclass(frozen=True)
class Rates:
    """Useful TFLOP/s of one device, in bf16, and TB/s of a copy (bytes read and written).

    Measured on one H200 (Megatron-core 0.16.1, TE 2.11, torch 2.11+cu130, packs of 8,192 tokens):

        Qwen3-8B-shaped forward                 200.2 ms with short documents, 235.5 ms with one long one
        Qwen3-1.7B-shaped forward + backward    148.5 ms and 193.7 ms, no heads
        fused heads                             41 ms for 2 N V (3 h_s + h_t) = 25.5 TFLOP
        copy                                    4.25 TB/s

    The difference of each pair is attention (490 and 447 TFLOP/s), the rest matrix products.

    Towers of Qwen2.5-VL 3B and 7B took 992.4 ms for the forward of 16,000 image tokens (transformers 5.17),
    before their MLPs were aligned (`mkd.models.vision.tower`). The counted work of `mkd.plan.models.towers`
    takes 613 ms; the rest would be explained by products of 3,420 channels at 179 TFLOP/s.
    """

    student_matmul: float = 488.0  # forward and backward, width 2048
    teacher_matmul: float = 583.0  # forward, width 4096
    attention: float = 460.0
    head: float = 620.0
    tower_matmul: float = 488.0  # as the student's; not measured since the MLPs are aligned
    copy: float = 4.25

    @classmethod
    def of_precision(cls, bf16: bool) -> Rates:
        """Return the rates of bf16, or of fp32 without TF32.

        On one H200 (torch 2.11+cu130, 2026-11-26) bare products of 8,192 tokens reach 50.2 to 52.2 TFLOP/s in
        fp32 (bf16: 693 to 788), and the forward of torch's attention 38.7 with documents of 1,024 tokens.
        """
        if bf16:
            return cls()
        return cls(FP32_PRODUCTS, FP32_PRODUCTS, FP32_ATTENTION, FP32_PRODUCTS, FP32_PRODUCTS)


@dataclass(frozen=True)
class WorkTime:
    """Milliseconds of one micro-batch in a layer, or on one (pipeline rank, virtual stage)."""

    # Teachers and student. The last stage adds the heads and the gradient of the student's head.
    forward_ms: float
    backward_ms: float
    exchange_ms: float = 0.0  # all-to-all of experts, part of both
    collectives_ms: float = 0.0  # of tensor and context parallelism, not hidden, part of both

    @property
    def total_ms(self) -> float:
        """Time of forward and backward."""
        return self.forward_ms + self.backward_ms

    def times(self, share: float) -> WorkTime:
        """Return the expected time of work that is done in this share of the micro-batches."""
        if share == 1:
            return self
        times = self.forward_ms, self.backward_ms, self.exchange_ms, self.collectives_ms
        return WorkTime(*(share * one for one in times))

    def __add__(self, other: WorkTime) -> WorkTime:
        return WorkTime(
            self.forward_ms + other.forward_ms,
            self.backward_ms + other.backward_ms,
            self.exchange_ms + other.exchange_ms,
            self.collectives_ms + other.collectives_ms,
        )


@dataclass(frozen=True)
class ModelTimer:
    """Gives the times of one model's layers on one process."""

    config: Config
    shape: ModelShape
    seq_length: int  # tokens of its packs
    sizes: Sizes  # processes along each axis
    document_length: int  # student tokens of a typical document
    rates: Rates
    matmul: float  # TFLOP/s of its products in the run's precision
    product_time: float = 1.0  # of its products over that time
    decoded_bytes: float = 0  # moved for each weight of experts that is decoded before a product

    def teacher(self) -> tuple[WorkTime, ...]:
        """Return the time of each layer of a teacher: its forward."""
        times = {layer: self._frozen(layer) for layer in set(self.shape.layers)}
        return tuple(times[layer] for layer in self.shape.layers)

    def _frozen(self, layer: LayerShape) -> WorkTime:
        collectives_ms, _ = self._collectives_ms(layer)
        forward_ms = self._forward_ms(layer) + self._counts_ms(layer) + collectives_ms
        return WorkTime(forward_ms, 0.0, self._exchange_ms(layer), collectives_ms)

    def student(self, num_stages: int) -> tuple[WorkTime, ...]:
        """Return the time of each layer of the student, forward and backward, recomputation included.

        Block recomputation is counted as if the `num_stages` stages were equal.
        """
        share = recomputed_share(self.config.training, self.shape.num_layers / num_stages)
        times = {layer: self._learning(layer, share) for layer in set(self.shape.layers)}
        return tuple(times[layer] for layer in self.shape.layers)

    def embedding(self, is_trained: bool) -> WorkTime:
        """Return the time of the collectives behind the embedding."""
        forward_ms, backward_ms = self.collectives.embedding_ms()
        return collectives_time(forward_ms, backward_ms if is_trained else 0.0)

    def head(self, reads: float, gradients: float) -> WorkTime:
        """Return the time of the collectives around the head, see `ModelCollectives.head_ms`."""
        return collectives_time(*self.collectives.head_ms(reads, gradients))

    def _learning(self, layer: LayerShape, share: float) -> WorkTime:
        training, exchange_ms = self.config.training, self._exchange_ms(layer)
        own_ms, (forward_ms, collectives_ms) = self._forward_ms(layer), self._collectives_ms(layer)
        backward_ms, exchanges = own_ms + self._compute_ms(layer) + self._additions_ms(layer), 2.0
        if self.config.lora.is_on:  # frozen weights have no gradients
            backward_ms = own_ms + self._mixing_ms(layer)
        if training.recompute_granularity == "full":
            again_ms = own_ms + self._counts_ms(layer)
            backward_ms, exchanges = backward_ms + share * again_ms, exchanges + share
            collectives_ms += share * forward_ms
        elif training.recompute_granularity == "selective":
            mixing_ms = self._mixing_ms(layer)
            if "core_attn" in training.recompute_modules and layer.has_attention:
                backward_ms += mixing_ms
                collectives_ms += self.collectives.context_ms(layer, mixing_ms)[0]
            if "mixer" in training.recompute_modules and layer.mixer:
                backward_ms += mixing_ms
            if "moe" in training.recompute_modules and layer.moe:
                products_ms = self._products_ms(mlp_parameters(self.shape, layer) + self._slower(layer))
                backward_ms += self._counts_ms(layer) + products_ms + self._copies_ms(layer) + exchange_ms
                collectives_ms += self.collectives.shared_experts_ms(layer)
                exchanges += 1
        both_ms = forward_ms + collectives_ms
        forward_ms += own_ms + self._counts_ms(layer)
        return WorkTime(forward_ms, backward_ms + collectives_ms, exchanges * exchange_ms, both_ms)

    def _collectives_ms(self, layer: LayerShape) -> tuple[float, float]:
        """Time of collectives in forward and backward that nothing hides."""
        tensor = self.collectives.layer_ms(layer)
        context = self.collectives.context_ms(layer, self._mixing_ms(layer))
        return tensor[0] + context[0], tensor[1] + context[1]

    @property
    def collectives(self) -> ModelCollectives:
        """The collectives of the model."""
        channel_bytes = self._tokens / self.sizes.context * self._element
        return ModelCollectives(self.sizes, self.config.parallel.sequence_parallel, self.shape, channel_bytes)

    def _forward_ms(self, layer: LayerShape) -> float:
        """Time of forward without collectives."""
        return self._compute_ms(layer) + self._copies_ms(layer) + self._exchange_ms(layer)

    def _counts_ms(self, layer: LayerShape) -> float:
        """Time in forward in which the device waits for the host."""
        return COUNTS_MS if layer.moe and self.sizes.expert > 1 else 0.0

    def _compute_ms(self, layer: LayerShape) -> float:
        """Time of products and attention, or a mixer, in forward. Backward takes it twice."""
        parameters = layer_matmul_parameters(self.shape, layer) + self._slower(layer)
        return self._products_ms(parameters) + self._mixing_ms(layer)

    def _slower(self, layer: LayerShape) -> float:
        """Return the parameters whose products would take as long as those of experts take longer."""
        if layer.moe is None:
            return 0.0
        return (EXPERT_PRODUCTS - 1) * layer.moe.top_k * expert_parameters(self.shape, layer.moe)

    def _copies_ms(self, layer: LayerShape) -> float:
        moved = ROW_COPIES * self._rows(layer) * self._row_width(layer) * self._element
        if layer.moe is not None and self.decoded_bytes:
            weights = layer.moe.num_experts // self.sizes.expert * matrix_weights(self.shape, layer.moe)
            return milliseconds(moved + self.decoded_bytes * weights, self.rates.copy)
        return milliseconds(moved, self.rates.copy)

    def _additions_ms(self, layer: LayerShape) -> float:
        """Time to add the gradients of the experts of this process to their buffers."""
        if layer.moe is None:
            return 0.0
        experts = layer.moe.num_experts // self.sizes.expert * expert_parameters(self.shape, layer.moe)
        return milliseconds(experts * (self._element + ADDED_BYTES), self.rates.copy)

    def _exchange_ms(self, layer: LayerShape) -> float:
        """Time of the two exchanges of a forward."""
        sizes = self._row_width(layer), self._element, self.sizes.expert
        return 2 * exchange_ms(self._rows(layer), *sizes)

    def _mixing_ms(self, layer: LayerShape) -> float:
        """Time of attention between its projections, or of a mixer, whose rate has not been measured."""
        document = min(self.document_length / self.config.training.seq_length, 1.0) * self.seq_length
        flops = layer_mixing_flops(self.shape, layer, self._tokens, round(self._tokens * document))
        return milliseconds(flops / self._ranks, self.rates.attention)

    def _products_ms(self, parameters: float) -> float:
        return self.product_time * milliseconds(2 * self._tokens * parameters / self._ranks, self.matmul)

    def _row_width(self, layer: LayerShape) -> int:
        hidden = self.shape.hidden_size
        return layer.moe.expert_width(hidden) if layer.moe else hidden

    def _rows(self, layer: LayerShape) -> int:
        """Rows that the experts of this process compute, if all experts are chosen equally often."""
        return self._tokens // self._ranks * layer.moe.top_k if layer.moe else 0

    @property
    def _tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.config.training.micro_batch_size * self.seq_length

    @property
    def _ranks(self) -> int:
        """Processes that share the tokens and the work of a layer."""
        return self.sizes.row

    @property
    def _element(self) -> int:
        return 2 if self.config.training.bf16 else 4


def collectives_time(forward_ms: float, backward_ms: float) -> WorkTime:
    """Return the time of collectives alone."""
    return WorkTime(forward_ms, backward_ms, collectives_ms=forward_ms + backward_ms)


def recomputed_share(training: TrainingConfig, layers: float) -> float:
    """Return the proportion (0 to 1) of a stage's `layers` that full recomputation runs again."""
    if training.recompute_granularity != "full":
        return 0.0
    if training.recompute_method == "uniform":
        return 1.0
    number = training.recompute_num_layers
    assert number is not None, "check_recomputation requires it for full recomputation"
    return min(number / layers, 1.0)


def milliseconds(amount: float, tera_per_s: float) -> float:
    """Return the time of that many FLOPs or bytes at 10^12 of them a second."""
    return amount / tera_per_s / 1e9
