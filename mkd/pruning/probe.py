"""A model whose layers run one at a time in one process, and scores of its predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mkd.convert.models import load_from_hf
from mkd.data.batch import PackedBatch
from mkd.errors import NonFiniteError
from mkd.losses import KDObjective, vocab_parallel_kd
from mkd.losses.lm_head import head_logits
from mkd.models.language_model import LanguageModel
from mkd.models.packed import PackedDocuments, packed_documents
from mkd.models.rope import query_factors
from mkd.parallel.context import ParallelContext
from mkd.plan.models.model_shape import ModelShape


@dataclass
class Score:
    """Sums over the loss tokens seen so far, and their means."""

    kl_sum: float = 0.0  # KL(teacher || model), nats
    ce_sum: float = 0.0  # cross entropy of the model, nats
    top1_sum: float = 0.0  # tokens at which both models' likeliest token is the same
    num_tokens: int = 0

    @property
    def kl(self) -> float:
        """KL to the teacher, nats per token."""
        return self.kl_sum / self.num_tokens

    @property
    def ce(self) -> float:
        """Cross entropy, nats per token."""
        return self.ce_sum / self.num_tokens

    @property
    def top1(self) -> float:
        """Proportion of tokens at which both models' likeliest token is the same."""
        return self.top1_sum / self.num_tokens


@dataclass(frozen=True)
class Row:
    """One batch at the entry of the first layer."""

    hidden: Tensor  # [t, 1, h] embeddings
    rope: Tensor  # rotary angles, as the layers take them
    documents: PackedDocuments
    batch: PackedBatch  # on the device


class Probe:
    """A frozen model. Nothing here has a gradient."""

    def __init__(self, model: LanguageModel, device: torch.device):
        self.model, self.device = model.eval().requires_grad_(False), device
        self.vocab_size = model.shape.vocab_size
        self.layers = model.decoder.layers
        self._objective = KDObjective(self.vocab_size, self.vocab_size, kd_ratio=1.0, with_ce_metric=True)

    @classmethod
    def load(cls, folder: Path, context: ParallelContext) -> Probe:
        """Load a Hugging Face folder: bf16 on a GPU, fp32 on a CPU."""
        dtype = torch.bfloat16 if context.platform.is_cuda else torch.float32
        return cls(load_from_hf(folder, ModelShape.from_hf_dir(folder), dtype, context), context.device)

    @torch.no_grad()
    def enter(self, batch: PackedBatch) -> Row:
        """Return the batch as embeddings, with its rotary angles."""
        batch = batch.to(self.device)
        documents = packed_documents(batch.cu_seqlens, batch.cu_seqlens_padded, batch.max_seqlen)
        documents.query_factors = query_factors(
            self.model.shape.ropes, documents, batch.tokens.size(1), self.model.context.row_shard
        )
        hidden = self.model.embedding(input_ids=batch.tokens, position_ids=batch.position_ids)
        if self.model.embedding_scale != 1.0:
            hidden = hidden * self.model.embedding_scale
        return Row(hidden, self.model.rotary_pos_emb(documents), documents, batch)

    @torch.no_grad()
    def trace(self, row: Row, layers: Sequence[int], hidden: Tensor | None = None) -> list[Tensor]:
        """Return the hidden states [t, 1, h] before each of `layers`, and behind the last.

        `hidden` enters the first of them; default: the embeddings.
        """
        states = [row.hidden if hidden is None else hidden]
        for layer in layers:
            state, _ = self.layers[layer](
                states[-1], attention_mask=None, rotary_pos_emb=row.rope, packed_seq_params=row.documents
            )
            states.append(state)
        return states

    def run(self, row: Row, layers: Sequence[int], hidden: Tensor | None = None) -> Tensor:
        """Return the hidden states [t, 1, h] behind `layers`, without keeping those between."""
        state = row.hidden if hidden is None else hidden
        for layer in layers:
            state = self.trace(row, (layer,), state)[-1]
        return state

    @torch.no_grad()
    def logits(self, row: Row, hidden: Tensor) -> Tensor:
        """Return fp32 logits [n, v] at the n loss rows of `hidden`, the states behind the last layer."""
        final = self.model.as_head_input(self.model.decoder.final_layernorm(hidden))[row.batch.loss_rows, 0]
        return head_logits(final, self.model.head_weight(), torch.float32, self.model.shape.logits_cap)

    @torch.no_grad()
    def add_score(self, score: Score, row: Row, logits: Tensor, teacher_logits: Tensor) -> None:
        """Add the predictions of one batch to `score`. Both logits are fp32 [n, v] at its loss rows.

        A KL that is not finite counts as infinite. Raises NonFiniteError if that is the teacher's doing.
        """
        rows, batch = row.batch.loss_rows, row.batch
        labels, mask = batch.labels[0, rows], batch.loss_mask[0, rows]
        output = vocab_parallel_kd(logits, teacher_logits, labels, mask, self._objective, tp_group=None)
        sums = torch.stack([output.kd, output.ce, output.top1_agreement]).tolist()
        if not math.isfinite(sums[0]):
            _require_finite(teacher_logits)
            sums[0] = math.inf
        score.kl_sum, score.ce_sum, score.top1_sum = (
            score.kl_sum + sums[0],
            score.ce_sum + sums[1],
            score.top1_sum + sums[2],
        )
        score.num_tokens += int(output.num_loss_tokens)


def _require_finite(teacher_logits: Tensor) -> None:
    if not teacher_logits.isfinite().all():
        what = "the teacher's logits are not finite on the given text"
        why = "weights with NaN or infinite values cannot be compared with a cut of themselves"
        do = "check the model: transformers computes the same"
        raise NonFiniteError(what, why, do, code="model-not-finite")
