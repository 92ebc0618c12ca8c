"""The stage of a teacher-student run: what one (pipeline rank, virtual stage) does with one micro-batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from mkd.models.language_model import LanguageModel
from mkd.models.packed import PackedDocuments
from mkd.models.stored_head import StoredHead
from mkd.parallel.image_row import ImageRow
from mkd.parallel.pipeline import attach_teacher_hidden, take_teacher_hidden

T = TypeVar("T")


@dataclass(frozen=True)
class StageInput:
    """One packed row of tokens, as every stage of a model takes it."""

    tokens: Tensor  # [1, t] int64
    position_ids: Tensor  # [1, t] int64
    packed_seq_params: PackedDocuments
    images: ImageRow | None = None  # None: a row of text alone
    is_needed: bool = True  # False: no loss reads this teacher's state, so it does not run


@dataclass(frozen=True)
class StageOutput:
    """The results of one stage for one micro-batch. The last stage hands them to the objective."""

    hidden: Tensor  # [t(/tp), 1, h_s] of the student; on the last stage after the last norm
    # Each [t_i(/tp), 1, h_i], final on the last stage, where stored ones follow; no graph.
    teacher_hiddens: tuple[Tensor, ...] = ()

    def message(self) -> Tensor:
        """Return the tensor for the next stage: the student's hidden state with the teachers' attached."""
        return attach_teacher_hidden(self.hidden, self.teacher_hiddens)


class DistillationStage(MegatronModule):
    """Owns the student's part of the stage, and holds the teachers' parts outside its parameters.

    DDP, the optimizer and checkpoints therefore never see a teacher. Teachers are frozen, but one may be the
    student itself. Megatron's schedules look up
    `model_type`, `vp_stage`, `pre_process`, `post_process` and `share_embeddings_and_output_weights` here.
    """

    def __init__(
        self,
        student: LanguageModel,
        teachers: Sequence[LanguageModel] = (),
        heads: Sequence[StoredHead] = (),  # of teachers that do not run here; on the last stage
        numbers: Sequence[int] = (),  # of `teachers`, then of `heads`, in the run; (): in their order
    ):
        super().__init__(config=student.config)
        self.student = student
        self.teachers = tuple(teachers)  # a tuple keeps them out of the module tree
        self.heads = tuple(heads)
        self.numbers = tuple(numbers or range(len(self.teachers) + len(self.heads)))
        self.teacher_time = Stopwatch()  # time of the teachers' layers in training
        self._live_input: Tensor | None = None  # of a teacher that is the student itself
        for teacher in teachers:
            if teacher is not student:
                teacher.eval().requires_grad_(False)
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = student.vp_stage
        self.pre_process = student.pre_process
        self.post_process = student.post_process
        self.share_embeddings_and_output_weights = student.share_embeddings_and_output_weights

    @property
    def running(self) -> tuple[int, ...]:
        """Numbers of `teachers`."""
        return self.numbers[: len(self.teachers)]

    @property
    def compared(self) -> tuple[LanguageModel | StoredHead, ...]:
        """All teachers whose heads the loss reads, by their numbers."""
        return self.by_number((*self.teachers, *self.heads))

    def by_number(self, values: Sequence[T]) -> tuple[T, ...]:
        """Return values of `teachers`, then of `heads`, by the numbers of the teachers."""
        numbered = sorted(zip(self.numbers, values, strict=True), key=lambda one: one[0])
        return tuple(value for _, value in numbered)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        return self.student.shared_embedding_or_output_weight()

    def set_input_tensor(self, input_tensor: list[Tensor | None] | Tensor | None) -> None:
        """Take the student's activation, with the teachers' attached to it.

        The schedule calls this before `forward`.
        """
        activation = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        self.student.set_input_tensor(activation)
        self._set_teacher_inputs(take_teacher_hidden(activation))

    def _set_teacher_inputs(self, teacher_hiddens: Sequence[Tensor]) -> None:
        for teacher, teacher_hidden in zip(
            self.teachers, teacher_hiddens or [None] * len(self.teachers), strict=True
        ):
            if teacher is self.student:  # which keeps its own input until it runs
                self._live_input = teacher_hidden
            else:
                teacher.set_input_tensor(teacher_hidden)

    def forward(self, student: StageInput, teachers: Sequence[StageInput] | None = ()) -> StageOutput:
        """Run the teachers under no_grad, then the student, on the same micro-batch.

        `teachers` has one input for each teacher. None: they run by themselves (`forward_teachers`).
        """
        teacher_hiddens = () if teachers is None else self._run_teachers(teachers)
        return StageOutput(_run(self.student, student), teacher_hiddens)

    def forward_teachers(
        self,
        rows: Sequence[StageInput],  # one for each teacher
        received: Sequence[Tensor] = (),  # hidden states of the stage before; (): this is the first stage
    ) -> tuple[Tensor, ...]:
        """Run the teachers alone, under no_grad, and return their hidden states, as `StageOutput` has them.

        The student keeps its input.
        """
        self._set_teacher_inputs(received)
        return self._run_teachers(rows)

    def _run_teachers(self, rows: Sequence[StageInput]) -> tuple[Tensor, ...]:
        teacher_hiddens = []
        is_timed = self.teachers and self.training
        timed = self.teacher_time.running(rows[0].tokens.device) if is_timed else nullcontext()
        with torch.no_grad(), timed:
            for teacher, row in zip(self.teachers, rows, strict=True):
                if teacher is self.student:
                    teacher_hiddens.append(self._run_live(row))
                    continue
                teacher_hiddens.append(_run(teacher, row) if row.is_needed else unread_state(teacher, row))
                teacher.set_input_tensor(None)
        return tuple(teacher_hiddens)

    def _run_live(self, row: StageInput) -> Tensor:
        """Run the student's layers as a teacher: in evaluation mode, so no record of training sees it."""
        student, was_training, own = self.student, self.student.training, self.student.decoder.input_tensor
        student.eval()
        student.set_input_tensor(self._live_input)
        hidden = _run(student, row)
        self._live_input = None
        student.train(was_training)
        student.set_input_tensor(own)
        return hidden


def take_teacher_ms(stages: Sequence[nn.Module]) -> float | None:
    """Return the milliseconds of the teachers' layers in training since the last call.

    `stages` may be wrapped or not. Return None without teachers.
    """
    own = [get_attr_wrapped_model(stage, "teachers", return_model_obj=True) for stage in stages]
    return sum(stage.teacher_time.take_ms() for stage in own) if own[0].teachers else None


def unread_state(teacher: LanguageModel, row: StageInput) -> Tensor:
    """Return what stands for the state of a teacher that does not run: memory without values.

    Pipeline messages keep their shapes, and nothing reads it.
    """
    shards = teacher.pg_collection.tp.size() if teacher.config.sequence_parallel else 1
    shape = row.tokens.shape[1] // shards, 1, teacher.config.hidden_size
    return torch.empty(shape, dtype=teacher.config.params_dtype, device=row.tokens.device)


def _run(model: LanguageModel, row: StageInput) -> Tensor:
    images = {} if row.images is None else {"images": row.images}
    return model(row.tokens, row.position_ids, packed_seq_params=row.packed_seq_params, **images)


@dataclass
class Stopwatch:
    """Adds up the time of blocks without waiting for them.

    The time is that between events in the stream of a GPU, and that of the clock on a CPU.
    """

    _spans: list = field(default_factory=list)  # (start, end) of each block since the last reading

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        start = _mark(device)
        yield
        self._spans.append((start, _mark(device)))

    def take_ended(self) -> tuple[int, float]:
        """Return (number, milliseconds) of the blocks that have ended since the last call. Never wait."""
        first = next((place for place, span in enumerate(self._spans) if not _is_over(span[1])), None)
        ended, self._spans = self._spans[:first], [] if first is None else self._spans[first:]
        return len(ended), sum(_between_ms(*span) for span in ended)

    def take_ms(self) -> float:
        """Return the milliseconds of the blocks since the last call.

        On a GPU, wait for the end of the last block.
        """
        spans, self._spans = self._spans, []
        if spans and isinstance(spans[-1][1], torch.cuda.Event):
            spans[-1][1].synchronize()
        return sum(_between_ms(*span) for span in spans)


def _is_over(mark: torch.cuda.Event | float) -> bool:
    return not isinstance(mark, torch.cuda.Event) or mark.query()


def _between_ms(start: Any, end: Any) -> float:
    return start.elapsed_time(end) if isinstance(end, torch.cuda.Event) else 1000 * (end - start)


def _mark(device: torch.device) -> torch.cuda.Event | float:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
