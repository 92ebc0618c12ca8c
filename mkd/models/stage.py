"""The teacher-student stage: what one (pipeline rank, virtual stage) runs for one micro-batch."""

from __future__ import annotations

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mkd.models.language_model import LanguageModel
from mkd.models.packed import PackedDocuments
from mkd.parallel.pipeline import attach_rider, take_rider


class PairStage(MegatronModule):
    """Owns the student's chunk; holds the frozen teacher's chunk outside its parameters.

    So DDP, the optimizer and checkpoints never see the teacher. Megatron's schedules look up `model_type`, `vp_stage`,
    `pre_process`, `post_process` and `share_embeddings_and_output_weights` here.
    """

    def __init__(self, student: LanguageModel, teacher: LanguageModel | None):
        super().__init__(config=student.config)
        self.student = student
        self._outside_the_module_tree = (teacher,)
        if teacher is not None:
            teacher.eval().requires_grad_(False)
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = student.vp_stage
        self.pre_process = student.pre_process
        self.post_process = student.post_process
        self.share_embeddings_and_output_weights = student.share_embeddings_and_output_weights

    @property
    def teacher(self) -> LanguageModel | None:
        return self._outside_the_module_tree[0]

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        return self.student.shared_embedding_or_output_weight()

    def set_input_tensor(self, input_tensor: list[Tensor | None] | Tensor | None) -> None:
        """Called by the schedule before `forward`: the student's activation, with the teacher's riding on it."""
        activation = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        self.student.set_input_tensor(activation)
        if self.teacher is not None:
            self.teacher.set_input_tensor(take_rider(activation))

    def forward(
        self,
        tokens: Tensor,  # [1, t] int64
        position_ids: Tensor,  # [1, t] int64
        packed_seq_params: PackedDocuments,
    ) -> Tensor:
        """Teacher under no_grad, then the student, of the same micro-batch.

        Returns the student's hidden state [t(/tp), 1, h_s]; the teacher's [t(/tp), 1, h_t] rides on it. On the last stage
        both are final (after the last norm, before the head).
        """
        rider = None
        if self.teacher is not None:
            with torch.no_grad():
                rider = self.teacher(tokens, position_ids, None, packed_seq_params=packed_seq_params)
            self.teacher.set_input_tensor(None)
        activation = self.student(tokens, position_ids, None, packed_seq_params=packed_seq_params)
        return attach_rider(activation, rider)
