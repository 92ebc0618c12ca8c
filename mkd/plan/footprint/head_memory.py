"""The memory of LM heads and of the loss, on the last pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.plan.facts import RunFacts
from mkd.plan.footprint.activations import Activations
from mkd.plan.footprint.head import SCORED_LOGIT_BYTES, head_block_rows
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.planned_teachers import Teacher


@dataclass(frozen=True)
class HeadMemory:
    """Sizes around the heads of all models on one process, bytes."""

    facts: RunFacts
    element: int  # bytes of a weight or an activation
    student_activations: Activations

    @property
    def _student(self) -> ModelShape:
        return self.facts.pair.student

    @property
    def vocab_rows(self) -> int:
        """Rows of each embedding and head on one process; models with the same tokens are padded alike."""
        tensor = self.facts.pair.sizes.tensor
        return max(shape.padded_vocab_size(tensor) for shape in self.facts.pair.same_tokens) // tensor

    def rows_of(self, teacher: Teacher) -> int:
        """Return the rows of a teacher's head. Across tokenizers each student row has one beside it."""
        tensor = self.facts.pair.sizes.tensor
        own = -(-teacher.shape.vocab_size // tensor) if teacher.is_cross_tokenizer else 0
        return max(self.vocab_rows, own)

    def stored_bytes(self) -> int:
        """Return the bytes of the heads of teachers whose hidden states are stored."""
        heads = self.facts.pair.heads
        return sum(self.vocab_rows * one.shape.hidden_size for one in heads) * self.element

    def activations(self, teacher: Teacher) -> Activations:
        """Return the sizes of a teacher's activations."""
        return Activations(self.facts.config, teacher.shape, self.element, teacher.seq_length, teacher.sizes)

    def peak_bytes(self, with_gradient: bool = True) -> int:
        """Return the bytes of the heads: the largest block (`_block_bytes`), and what all rows keep.

        All rows keep every teacher's hidden state, the gradient of the student's, and statistics. With
        sequence parallelism hidden states are gathered.
        """
        student, teachers = self.student_activations, self.facts.pair.compared
        compared = teachers if self.facts.config.kd.kd_ratio > 0 else ()
        groups: list[tuple[Teacher, ...]] = [(teacher,) for teacher in compared] or [()]
        if self.facts.config.kd.averages_teachers:
            groups = [teachers]
        whole = 8 * 4 * student.tokens + student.full_hidden_bytes * (with_gradient + student.is_sharded)
        for teacher in map(self.activations, teachers):
            whole += teacher.hidden_bytes + teacher.is_sharded * teacher.full_hidden_bytes
        for head in map(self.activations, self.facts.pair.heads):  # the rows of the loss, and the whole row
            whole += head.full_hidden_bytes + head.is_sharded * (head.full_hidden_bytes - head.hidden_bytes)
        blocks = [self._block_bytes(group, with_gradient) for group in groups]
        return whole + max([*blocks, self._scored_block_bytes()])

    def _scored_block_bytes(self) -> int:
        """Return the bytes of a pass that scores tokens, for judged answers or metrics of rollouts; or 0."""
        work = self.facts.work
        if not (work.scores_tokens or work.scores_for_metrics):
            return 0
        rows = head_block_rows(self.student_activations.tokens, self.vocab_rows, SCORED_LOGIT_BYTES)
        return rows * (self.vocab_rows * SCORED_LOGIT_BYTES + self._student.hidden_size * self.element)

    def _block_bytes(self, teachers: tuple[Teacher, ...], with_gradient: bool) -> int:
        """Return the bytes of one divergence, for a block of rows (all rows, beside top-k predictions).

        They hold the logits of all models, their hidden states and the student's gradient. The weight's
        gradient goes into DDP's buffer. Without a gradient logits are fp32.
        """
        kd = self.facts.config.kd
        is_fp32 = kd.kd_fp32_logits or not with_gradient
        bytes_per_logit = 4 if is_fp32 else self.element
        tokens = self.student_activations.tokens
        rows = tokens
        if self.facts.has_only_heads:
            columns = max([self.vocab_rows, *map(self.rows_of, teachers)])
            rows = head_block_rows(rows, columns, bytes_per_logit)
        hidden_bytes = self._student.hidden_size * self.element
        of_row = self.vocab_rows * bytes_per_logit + (1 + with_gradient) * hidden_bytes
        if is_fp32 and with_gradient and self.element < 4:
            of_row += self.vocab_rows * self.element  # gradient; bf16 logits are overwritten by theirs
        if self._student.logits_cap and with_gradient:
            of_row += self.vocab_rows * bytes_per_logit  # tanh, which the gradient passes
        total = rows * of_row
        for teacher in teachers:
            of_row = self.rows_of(teacher) * bytes_per_logit + teacher.shape.hidden_size * self.element
            total += -(-rows * self.activations(teacher).tokens // tokens) * of_row
        return total
