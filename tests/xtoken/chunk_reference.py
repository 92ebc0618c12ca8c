"""The chunk losses by their definitions, which tests compare with: dense, chunk by chunk, autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.xtoken.chunks import ChunkBatch
from mkd.xtoken.loss_settings import ChunkLossSettings


@dataclass(frozen=True)
class DenseRelation:
    """Two vocabularies in the order of their ids, real rows only."""

    common: list[tuple[int, int]]  # (student id, teacher id)
    paired: list[tuple[int, int]]  # of the hybrid losses: `common`, for h_kl with relaxed pairs
    projection: Tensor | None  # [v_s, v_t]
    # [v_s], [v_t]: the common token that each begins with, see VocabularyRelation
    beginnings: tuple[Tensor, Tensor] | None = None


def dense_chunk_kd(
    student_logits: Tensor,  # [t, v_s]
    teacher_logits: Tensor,  # [t', v_t]
    chunks: ChunkBatch,  # its rows count in these logits
    relation: DenseRelation,
    settings: ChunkLossSettings,
) -> dict[str, Tensor]:
    """Return the fields of `ChunkOutput`, differentiable by the student's logits."""
    names = (
        "kd",
        "teacher_ce",
        "teacher_entropy",
        "top1_agreement",
        "num_chunks",
        "num_one_to_one",
        "num_teacher_tokens",
    )
    sums = dict.fromkeys(names, torch.zeros((), dtype=student_logits.dtype))
    for i in range(len(chunks.kinds)):
        of_student, of_teacher = (
            slice(*side.host_offsets[i : i + 2]) for side in (chunks.student, chunks.teacher)
        )
        s_labels, t_labels = (
            chunks.student.labels[of_student].tolist(),
            chunks.teacher.labels[of_teacher].tolist(),
        )
        if chunks.weights[i] == 0:
            continue
        z, y = (
            student_logits[chunks.student.rows[of_student]],
            teacher_logits[chunks.teacher.rows[of_teacher]],
        )
        own = slice(*chunks.support_offsets[i : i + 2])
        pairs = list(
            zip(chunks.support_student[own].tolist(), chunks.support_teacher[own].tolist(), strict=True)
        )
        s, t = (torch.softmax(logits / settings.temperature, dim=1) for logits in (z, y))
        value = _value(_Chunk(s, t, s_labels, t_labels, pairs), relation, settings)
        plain = torch.log_softmax(y, dim=1)
        found = {
            "kd": chunks.weights[i].to(value.dtype) * settings.scale * value,
            "teacher_ce": -sum(plain[row, label] for row, label in enumerate(t_labels)),
            "teacher_entropy": -(plain.exp() * plain).sum(),
            "num_chunks": 1,
            "num_teacher_tokens": len(t_labels),
        }
        if len(s_labels) == len(t_labels) == 1:
            agrees = (int(z.argmax()), int(y.argmax())) in relation.common
            found |= {"num_one_to_one": 1, "top1_agreement": int(agrees)}
        sums = {name: total + found.get(name, 0) for name, total in sums.items()}
    return {"loss": sums["kd"], **sums}


@dataclass(frozen=True)
class _Chunk:
    s: Tensor  # [n, v_s] probabilities
    t: Tensor  # [m, v_t]
    s_labels: list[int]
    t_labels: list[int]
    pairs: list[tuple[int, int]]

    @property
    def is_one_to_one(self) -> bool:
        return len(self.s_labels) == len(self.t_labels) == 1


def _value(chunk: _Chunk, relation: DenseRelation, settings: ChunkLossSettings) -> Tensor:
    if settings.loss == "partition_kl":
        return _partition(chunk, relation, settings)
    if settings.loss == "prefix_kl":
        value = _beginning(chunk, relation, settings)
        return value if chunk.is_one_to_one else value + _partition(chunk, relation, settings)
    if settings.loss == "p_kl":
        return _projected(chunk, relation, settings)
    s = _chunk_distribution(chunk.s, chunk.s_labels)
    t = _chunk_distribution(chunk.t, chunk.t_labels)
    if settings.loss == "uld":
        return _sorted_l1(s, t)
    return _hybrid(chunk, s, t, relation, settings)


def _partition(chunk: _Chunk, relation: DenseRelation, settings: ChunkLossSettings) -> Tensor:
    pairs = chunk.pairs
    if chunk.is_one_to_one:
        pairs = relation.common
        if settings.top_k is not None and settings.top_k < len(pairs):
            pairs = sorted(pairs, key=lambda pair: -float(chunk.t[0, pair[1]]))[: settings.top_k]
    s = _chunk_distribution(chunk.s, chunk.s_labels)
    t = _chunk_distribution(chunk.t, chunk.t_labels)
    return _with_rest(s, t, pairs, chunk, settings)


def _with_rest(
    s: Tensor, t: Tensor, pairs: list[tuple[int, int]], chunk: _Chunk, settings: ChunkLossSettings
) -> Tensor:
    """Return the divergence over {pairs, rest}, or on the pairs alone if they hold all tokens of a side."""
    s_ids, t_ids = (list(ids) for ids in zip(*pairs, strict=True))
    has_rest = (len(pairs) < s.shape[0] or len(chunk.s_labels) > 1) and (
        len(pairs) < t.shape[0] or len(chunk.t_labels) > 1
    )
    s_classes, t_classes = s[s_ids], t[t_ids]
    if has_rest:
        s_classes = torch.cat([s_classes, 1 - s_classes.sum(dim=0, keepdim=True)])
        t_classes = torch.cat([t_classes, 1 - t_classes.sum(dim=0, keepdim=True)])
    else:
        s_classes, t_classes = s_classes / s_classes.sum(), t_classes / t_classes.sum()
    return divergence(s_classes, t_classes, settings)


def divergence(s: Tensor, t: Tensor, settings: ChunkLossSettings) -> Tensor:
    """Return the divergence of two distributions [k]; a probability of 0 is replaced by a tiny one."""
    log_t, log_s = (p.clamp(min=torch.finfo(p.dtype).tiny).log() for p in (t, s))
    return settings.divergence.plain(log_t, log_s)


def _beginning(chunk: _Chunk, relation: DenseRelation, settings: ChunkLossSettings) -> Tensor:
    """Return the divergence of the first rows over the common tokens that tokens begin with.

    Control tokens of a side are the rest.
    """
    classes, common = [], [s for s, _ in relation.common]
    for row, of in zip((chunk.s[0], chunk.t[0]), relation.beginnings, strict=True):
        masses = torch.stack([row[of == c].sum() for c in common])
        classes.append(torch.cat([masses, row[~torch.isin(of, torch.tensor(common))].sum()[None]]))
    s, t = classes
    if min(bool((~torch.isin(of, torch.tensor(common))).any()) for of in relation.beginnings):
        return divergence(s, t, settings)
    return divergence(s[:-1] / s[:-1].sum(), t[:-1] / t[:-1].sum(), settings)


def _projected(chunk: _Chunk, relation: DenseRelation, settings: ChunkLossSettings) -> Tensor:
    s, t, matrix = chunk.s.mean(dim=0), chunk.t.mean(dim=0), relation.projection
    supported = (matrix > 0).any(dim=0)
    lost = (1 - matrix.sum(dim=1)).clamp(min=0)
    lost = torch.where(lost < 1e-6, 0.0, lost)
    s_classes, t_classes = (s @ matrix)[supported], t[supported]
    if bool((lost > 0).any()) and not bool(supported.all()):
        s_classes = torch.cat([s_classes, (s @ lost)[None]])
        t_classes = torch.cat([t_classes, t[~supported].sum()[None]])
    else:
        s_classes, t_classes = s_classes / s_classes.sum(), t_classes / t_classes.sum()
    return divergence(s_classes, t_classes, settings)


def _chunk_distribution(p: Tensor, labels: list[int]) -> Tensor:
    """Return the last row's probabilities times those of the other rows' tokens, [v]."""
    result = p[len(labels) - 1]
    for row, label in enumerate(labels[:-1]):
        result = result * p[row, label]
    return result


def _hybrid(
    chunk: _Chunk, s: Tensor, t: Tensor, relation: DenseRelation, settings: ChunkLossSettings
) -> Tensor:
    weights = settings.hybrid_weights(len(relation.common) / t.shape[0])
    s_rest = [i for i in range(s.shape[0]) if i not in {pair[0] for pair in relation.paired}]
    t_rest = [i for i in range(t.shape[0]) if i not in {pair[1] for pair in relation.paired}]
    common = _with_rest(s, t, relation.paired, chunk, settings)
    return weights[0] * common + weights[1] * _sorted_l1(s[s_rest], t[t_rest])


def _sorted_l1(s: Tensor, t: Tensor) -> Tensor:
    s, t = s.sort(descending=True).values, t.sort(descending=True).values
    size = max(len(s), len(t))
    pad = torch.nn.functional.pad
    return (pad(s, (0, size - len(s))) - pad(t, (0, size - len(t)))).abs().sum()
