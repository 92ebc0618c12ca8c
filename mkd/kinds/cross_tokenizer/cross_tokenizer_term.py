"""A teacher with another tokenizer, compared on aligned chunks of text (docs/cross-tokenizer.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from mkd.losses.scores import token_scores
from mkd.parallel.exchange import exchange_rows
from mkd.train.sums import TermSums
from mkd.train.teachers.base import LossInput, PackScores, head_input
from mkd.train.teachers.chunked import ChunkedTerm
from mkd.xtoken.fused import fused_chunk_kd
from mkd.xtoken.loss_settings import ChunkLossSettings
from mkd.xtoken.segments import sum_by
from mkd.xtoken.vocabulary.chunk_vocabulary import ChunkVocabulary

NOT_LAST = "a term is computed where the last stage is"


@dataclass(frozen=True)
class CrossTokenizer(ChunkedTerm):
    """A teacher that reads the same text in the tokens of another tokenizer."""

    name: str
    share: float
    index: int  # number of its model in the stage
    settings: ChunkLossSettings
    vocabulary: ChunkVocabulary | None  # beside the student's; None on ranks without the last stage
    factor: float = 1.0

    def loss(self, given: LossInput, scale: Tensor) -> tuple[Tensor, TermSums]:
        student, teacher = given.stage.student, given.stage.compared[self.index]
        assert self.vocabulary is not None, NOT_LAST
        chunks, pack_weights = self._chunks(given.batch), given.pack_weights[self.name]
        chunks = replace(chunks, weights=chunks.weights * pack_weights[chunks.packs])
        output = fused_chunk_kd(
            head_input(student, given.output.hidden),
            head_input(teacher, given.output.teacher_hiddens[self.index]),
            chunks,
            vocabulary=self.vocabulary,
            settings=self.settings,
            tp_group=given.context.tp_group,
            cp_group=given.context.row_group,
            loss_gradient=scale,
            sequence_parallel=student.config.sequence_parallel,
            fp32_logits=given.fp32_logits,
        )
        return output.loss, TermSums(
            kd=output.kd,
            weight=chunks.weights.sum(),
            rows=len(chunks.kinds),
            ce=output.teacher_ce,
            entropy=output.teacher_entropy,
            tokens=output.num_teacher_tokens,
            top1_agreement=output.top1_agreement,
            compared=output.num_one_to_one,
        )

    def pack_scores(self, given: LossInput) -> PackScores:
        model, chunks = given.stage.compared[self.index], self._chunks(given.batch)
        assert self.vocabulary is not None, NOT_LAST
        side, exchange = chunks.teacher, chunks.teacher.exchange

        def with_rows_of_other_ranks(hidden: Tensor) -> Tensor:
            if exchange is None:
                return hidden
            return exchange_rows(
                hidden,
                exchange.send_rows,
                exchange.send_counts,
                exchange.receive_counts,
                given.context.row_group,
            )

        scores = token_scores(
            given.output.teacher_hiddens[self.index].squeeze(1),
            model.head_weight(),
            side.rows,
            self.vocabulary.teacher_places[side.labels],
            tp_group=given.context.tp_group,
            logits_cap=model.shape.logits_cap,
            real=self.vocabulary.teacher_real[self.vocabulary.rank],
            sequence_parallel=given.stage.student.config.sequence_parallel,
            exchange=with_rows_of_other_ranks,
        )
        return PackScores(
            scores,
            packs=chunks.packs.repeat_interleave(side.offsets.diff(), output_size=len(side.rows)),
            covered=sum_by(chunks.packs, chunks.student.offsets.diff().float(), given.num_packs),
        )
