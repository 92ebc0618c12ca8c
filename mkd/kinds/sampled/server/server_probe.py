"""A few completions whose log-probabilities show which weights a server has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from mkd.errors import ServerAnswer
from mkd.kinds.sampled.sampler.decoding import sample_completions
from mkd.kinds.sampled.sampler.pipeline_forward import PipelineForward
from mkd.kinds.sampled.sampler.rollouts import Request, Rollout, Sampling
from mkd.kinds.sampled.server.server_client import ServerClient
from mkd.losses.scores import token_scores
from mkd.models.language_model import LanguageModel
from mkd.models.packed import packed_documents
from mkd.models.whole_rows import whole_rows
from mkd.parallel.context import ParallelContext

DOCUMENTS, TOKENS = 4, 16  # of a probe, at most
LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.1}  # mean difference of ln p that rounding explains, nats
CLEAR = 4.0  # weights differ clearly if ln p moved by so many times the rounding


@dataclass(frozen=True)
class Scores:
    """The ln p of the probe's tokens, [n] fp64 each, at one version of the weights."""

    ours: np.ndarray
    server: np.ndarray

    @property
    def gap(self) -> float:
        """Mean difference, nats."""
        return float(np.abs(self.ours - self.server).mean())


def sample_probe(
    parts: Sequence[LanguageModel], context: ParallelContext, requests: Sequence[Request], sampling: Sampling
) -> list[Rollout]:
    """Return short completions of the shortest prompts, sampled by the training model. Collective."""
    short = replace(sampling, max_new_tokens=max(1, min(TOKENS, sampling.max_new_tokens - 1)))
    chosen = sorted(
        {one.prompt: one for one in requests}.values(), key=lambda one: (len(one.ids), one.prompt)
    )
    return sample_completions(parts, context, chosen[:DOCUMENTS], short, iteration=0)


@torch.no_grad()
def score(
    parts: Sequence[LanguageModel], context: ParallelContext, documents: Sequence[Rollout], vocab_size: int
) -> np.ndarray:
    """Return ln p of the completions' tokens by the training model, fp64 [n]. Collective in a replica."""
    forward = PipelineForward(parts, context)
    lengths = [len(one.request.ids) + len(one.ids) for one in documents]
    spans = [*lengths[:-1], lengths[-1] + forward.missing(sum(lengths))]
    tokens = np.zeros(sum(spans), dtype=np.int64)
    tokens[: sum(lengths)] = np.concatenate([np.append(one.request.ids, one.ids) for one in documents])
    starts = np.cumsum(lengths) - lengths + [len(one.request.ids) - 1 for one in documents]
    rows = [
        row for start, one in zip(starts, documents, strict=True) for row in start + np.arange(len(one.ids))
    ]
    borders = [torch.tensor(np.cumsum([0, *one]), dtype=torch.int32) for one in (lengths, spans)]
    real, padded = (one.to(context.device) for one in borders)
    packed = packed_documents(real, padded, max(spans), context.platform.transformer_engine)
    was_training = [part.training for part in parts]
    for part in parts:
        part.eval()
    with whole_rows(parts):
        hidden = forward.run(forward.on_device(tokens), packed, rows)
    for part, training in zip(parts, was_training, strict=True):
        part.train(training)
    found = torch.zeros(len(rows), dtype=torch.float64, device=context.device)
    if hidden is not None:
        labels = forward.on_device(np.concatenate([one.ids for one in documents]))
        where, weight = torch.arange(len(rows), device=context.device), parts[-1].head_weight()
        settings = dict(tp_group=context.tp_group, logits_cap=parts[-1].shape.logits_cap)
        scores = token_scores(hidden, weight, where, labels, vocab_size=vocab_size, **settings)
        found.copy_(scores.label)
    forward.finish()
    dist.broadcast(found, forward.last_rank, group=context.pp_group)
    return found.cpu().numpy()


def server_scores(client: ServerClient, model: str, documents: Sequence[Rollout]) -> np.ndarray:
    """Return ln p of the completions' tokens by the server, fp64 [n]. Raises ServerAnswer without them."""
    found: list[float] = []
    for one in documents:
        ids = [*one.request.ids.tolist(), *one.ids.tolist()]
        body = dict(model=model, prompt=ids, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        answer = client.post("/v1/completions", body)
        try:
            scores = answer["choices"][0]["prompt_logprobs"]
            found += [scores[i][str(ids[i])]["logprob"] for i in range(len(one.request.ids), len(ids))]
        except (KeyError, IndexError, TypeError):
            raise ServerAnswer(
                "the rollout server returns no prompt_logprobs",
                "they show that it has the weights of this step",
                "use a vLLM server with prompt_logprobs",
                code="rollout-server-answer",
            ) from None
    return np.array(found)


def largest_gap(dtype: torch.dtype) -> float:
    """Return the mean difference of ln p, in nats, that rounding explains."""
    return LIMITS.get(dtype, LIMITS[torch.bfloat16])


def check_refit(old: Scores | None, new: Scores, dtype: torch.dtype, version: int) -> None:
    """Raise ServerAnswer unless the server's ln p are those of the new weights.

    They must agree up to rounding. If training has moved them clearly since the last exchange (`old`), the
    server's must also be nearer to the new ones than to the old ones.
    """
    why = f"its log-probabilities of a probe differ by {new.gap:.3g} nats on average"
    is_close = new.gap <= largest_gap(dtype)
    if is_close and old is not None:
        moved = float(np.abs(new.ours - old.ours).mean())
        to_old = float(np.abs(new.server - old.ours).mean())
        if moved > CLEAR * max(old.gap, 1e-9) and to_old < new.gap:
            is_close, why = False, f"{why}, and by {to_old:.3g} from those of the weights before"
    if not is_close:
        raise ServerAnswer(
            f"the rollout server does not have the student's weights after {version} updates",
            why,
            "start vLLM with the student's folder, in the precision of the training (--dtype), and let no "
            "other run use it",
            code="rollout-server-weights",
        )
