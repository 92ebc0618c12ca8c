"""Peak GPU memory of every pipeline rank, before anything runs.

Weights, gradients and optimizer state follow from parameter counts. Activations are counted tensor by tensor, as
Transformer Engine's layers save them; how many micro-batches are alive follows from the order of the schedule. Not counted:
fragmentation of torch's allocator (a few percent of what it reserves).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from mkd.plan.activations import Activations
from mkd.plan.batch import BatchPlan
from mkd.plan.bubble import rank_order
from mkd.plan.head import head_chunk_rows
from mkd.plan.layout import PipelineLayout
from mkd.plan.model_shape import ModelShape

GIB = 2**30
WORKSPACE_GIB = 0.1  # cuBLAS workspaces of torch and Transformer Engine (32 MiB each on Hopper), inputs, loss scalars
CONTEXT_GIB = 0.6  # CUDA context, loaded kernels
NCCL_GIB = 0.3  # buffers of one communicator between several processes


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of one pipeline rank, GiB per process. The first rows are allocated by torch, `device_gib` is not."""

    student_gib: float  # weights
    gradients_gib: float  # fp32 buffer of DDP
    optimizer_gib: float  # fp32 master weights (bf16 runs) and two moments
    teacher_gib: float  # weights
    activations_gib: float  # of the student, all micro-batches that are alive at the peak
    transient_gib: float  # teacher's forward, head, or one layer's backward, whatever makes the peak; messages; workspaces
    device_gib: float  # CUDA context and NCCL: seen by nvidia-smi, not by torch

    @property
    def allocated_gib(self) -> float:
        """What `torch.cuda.max_memory_allocated` will say."""
        return self.total_gib - self.device_gib

    @property
    def total_gib(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    def describe(self) -> str:
        parts = " + ".join(f"{field.name.removesuffix('_gib')} {getattr(self, field.name):.2f}" for field in fields(self))
        return f"{self.total_gib:.1f} GiB = {parts}"


@dataclass(frozen=True)
class MemoryPlan:
    """The prediction for all pipeline ranks; processes of one pipeline rank are alike."""

    ranks: tuple[RankMemory, ...]

    def describe(self) -> str:
        """One line per pipeline rank."""
        lines = [f"memory of pipeline rank {rank}: {memory.describe()}" for rank, memory in enumerate(self.ranks)]
        return "\n".join(lines)


def predict_memory(
    config: Any,
    student: ModelShape,
    teacher: ModelShape | None,
    student_layout: PipelineLayout,
    teacher_layout: PipelineLayout | None,
    batch: BatchPlan,
) -> MemoryPlan:
    """Predict training under an `mkd.config.schema.Config` on GPUs, with Transformer Engine layers and the fused head."""
    pair = _Pair(config, student, teacher, student_layout, teacher_layout, batch)
    return MemoryPlan(tuple(pair.rank_memory(rank) for rank in range(student_layout.pipeline_parallel)))


def stage_parameters(shape: ModelShape, layers: int, tensor_parallel: int, vocab_rows: int, *ends: bool) -> int:
    """Parameters of one process: `layers` decoder layers, and what the first and the last stage (`ends`) have besides.

    Attention groups are padded to a multiple of `tensor_parallel`, and `vocab_rows` rows are held by each embedding or head.
    """
    is_first, is_last = ends
    groups = shape.padded_query_groups(tensor_parallel) // tensor_parallel
    query, key_value = groups * shape.heads_per_group * shape.head_dim, groups * shape.head_dim
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size // tensor_parallel
    layer = hidden * (2 * query + 2 * key_value + 3 * ffn + 2)
    layer += (query + 2 * key_value) * shape.qkv_bias + hidden * shape.attention_output_bias
    layer += (2 * ffn + hidden) * shape.mlp_bias + 2 * shape.head_dim * shape.qk_norm
    tables = is_first + is_last - (is_first and is_last and shape.tie_word_embeddings)
    return layers * layer + tables * vocab_rows * hidden + is_last * hidden


@dataclass(frozen=True)
class _Pair:
    """The arguments of `predict_memory`, and the sizes that follow from them."""

    config: Any
    student: ModelShape
    teacher: ModelShape | None
    student_layout: PipelineLayout
    teacher_layout: PipelineLayout | None
    batch: BatchPlan

    @property
    def element(self) -> int:
        """Bytes of a weight or an activation."""
        return 2 if self.config.training.bf16 else 4

    @property
    def vocab_rows(self) -> int:
        """Of each embedding and head on one process: both models are padded alike."""
        tensor = self.config.parallel.tensor_model_parallel_size
        return max(shape.padded_vocab_size(tensor) for shape in (self.student, self.teacher) if shape) // tensor

    def rank_memory(self, rank: int) -> RankMemory:
        parallel = self.config.parallel
        learned = self._parameters(self.student, self.student_layout, rank)
        frozen = self._parameters(self.teacher, self.teacher_layout, rank) if self.teacher else 0
        replicas = self.batch.data_parallel * parallel.context_parallel_size
        state_bytes = (12 if self.config.training.bf16 else 8) / (replicas if parallel.use_distributed_optimizer else 1)
        alive, transient = max(self._moments(rank), key=sum)
        groups = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, replicas)
        return RankMemory(
            student_gib=learned * self.element / GIB,
            gradients_gib=learned * 4 / GIB,
            optimizer_gib=learned * state_bytes / GIB,
            teacher_gib=frozen * self.element / GIB,
            activations_gib=alive / GIB,
            transient_gib=(transient + self._message_bytes()) / GIB + WORKSPACE_GIB,
            device_gib=CONTEXT_GIB + NCCL_GIB * sum(size > 1 for size in groups),
        )

    def _parameters(self, shape: ModelShape, layout: PipelineLayout, rank: int) -> int:
        tensor, stages = self.config.parallel.tensor_model_parallel_size, len(layout.layers)
        return sum(
            stage_parameters(shape, layout.layers[stage], tensor, self.vocab_rows, stage == 0, stage == stages - 1)
            for stage in range(rank, stages, layout.pipeline_parallel)
        )

    def _moments(self, rank: int) -> Iterator[tuple[int, int]]:
        """(activations alive, transient), bytes, at each moment of the rank's schedule that may be its peak."""
        layout, last = self.student_layout, len(self.student_layout.layers) - 1
        student = Activations(self.config, self.student, self.element)
        teacher = Activations(self.config, self.teacher, self.element) if self.teacher else None
        head = self._head_bytes(student, teacher)
        table = self.vocab_rows * self.student.hidden_size * self.element  # what autograd gets as gradient of embedding or head
        alive = 0
        for task in rank_order(rank, layout.pipeline_parallel, layout.virtual_stages, self.batch.num_microbatches):
            stage = task.virtual_stage * layout.pipeline_parallel + rank
            kept = student.chunk_bytes(layout.layers[stage], is_last=stage == last)
            if task.is_forward:
                yield alive, teacher.forward_bytes() if teacher and self.teacher_layout.layers[stage] else 0
                alive += kept
                yield alive, head if stage == last else 0
            else:
                layer = student.backward_bytes() if layout.layers[stage] else 0
                yield alive, layer + (table if stage == last else 0)
                alive -= kept
                yield alive, table if stage == 0 else 0

    def _head_bytes(self, student: Activations, teacher: Activations | None) -> int:
        """The head: for a chunk of rows (all, if it is not fused) the logits of both models, their hidden states and the
        student's gradient; for all rows the teacher's hidden state, the gradient of the student's, and statistics.

        With sequence parallelism both hidden states are gathered. The weight's gradient goes into DDP's buffer.
        """
        kd = self.config.kd
        bytes_per_logit = 4 if kd.kd_fp32_logits else self.element
        rows = student.tokens
        if kd.kd_fused_head and not any(source.topk for source in self.config.teachers):
            rows = head_chunk_rows(rows, self.vocab_rows, bytes_per_logit)
        of_logit = (2 if teacher else 1) * bytes_per_logit
        if kd.kd_fp32_logits and self.element < 4:
            of_logit += self.element  # the gradient; bf16 logits are overwritten by theirs
        widths = 2 * self.student.hidden_size + (self.teacher.hidden_size if self.teacher else 0)
        chunk = rows * (self.vocab_rows * of_logit + widths * self.element)
        whole = 8 * 4 * student.tokens + student.full_hidden_bytes * (1 + student.is_sharded)
        if teacher:
            whole += teacher.hidden_bytes + teacher.is_sharded * teacher.full_hidden_bytes
        return chunk + whole

    def _message_bytes(self) -> int:
        """Pipeline messages: activations of both models on the way in and out, or the student's gradients."""
        if self.config.parallel.pipeline_model_parallel_size == 1:
            return 0
        shapes = [shape for shape in (self.student, self.teacher) if shape]
        return 2 * sum(Activations(self.config, shape, self.element).hidden_bytes for shape in shapes)
