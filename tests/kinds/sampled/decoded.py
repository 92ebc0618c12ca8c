"""Sample completions of random prompts on the ranks of a layout, and score them in the packed forward."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

VOCAB_SIZE, STOP_ID = 307, 7


@dataclass(frozen=True)
class Place:
    """A layout of the student."""

    name: str
    ranks: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vp: int = 1
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32


def load_parts(folder: Path, place: Place):
    """Return (context, parts) of the model on this rank, with its weights, in training mode."""
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint
    from mkd.checkpoint.hf.hf_weights import load_hf_weights
    from mkd.models.builder import build_model_parts
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.models.model_shape import ModelShape
    from mkd.plan.parallel_sizes import Sizes
    from mkd.platform import detect

    sizes = Sizes(tensor=place.tp, context=place.cp, pipeline=place.pp)
    context = ParallelContext.create(detect(), sizes, virtual_stages=place.vp)
    shape = ModelShape.from_hf_dir(folder)
    layout = PipelineLayout(
        (shape.num_layers // (place.pp * place.vp),) * place.pp * place.vp, place.pp, place.vp
    )
    options = ModelOptions(sequence_parallel=place.sequence_parallel, dtype=place.dtype)
    parts = build_model_parts(shape, layout, options, context)
    for part in parts:
        load_hf_weights(part, shape, HFCheckpoint(folder), context, part.first_layer)
        part.train()
    return context, parts


def requests(count: int, samples: int = 1) -> list:
    """Return random prompts of 1 to 16 tokens, each `samples` times."""
    from mkd.kinds.sampled.sampler.rollouts import Request

    random = np.random.default_rng(5)
    prompts = [random.integers(1, VOCAB_SIZE, size=random.integers(1, 17)) for _ in range(count)]
    return [Request(p, s, ids) for p, ids in enumerate(prompts) for s in range(samples)]


def sample(folder: Path, place: Place, asked: list, fixed_rows: str = "auto", **settings) -> list[tuple]:
    """Return (prompt, sample, ids, ln p, finish) of the completions of this replica."""
    from mkd.kinds.sampled.sampler.decoding import sample_completions
    from mkd.kinds.sampled.sampler.rollouts import Sampling

    context, parts = load_parts(folder, place)
    settings = {"stop_ids": frozenset({STOP_ID})} | settings
    sampling = Sampling(vocab_size=VOCAB_SIZE, seed=11, **settings)
    context = context.with_whole_rows()
    mine = asked[context.dp_rank :: context.dp_size]
    known = places_of(parts)
    found = sample_completions(parts, context, mine, sampling, iteration=3, fixed_rows=fixed_rows)
    assert all(part.training for part in parts)
    assert not [name for part in parts for name, one in part.named_modules() if hasattr(one, "cache")]
    assert known == places_of(parts)
    return [(r.request.prompt, r.request.sample, r.ids.tolist(), r.logp, r.finish) for r in found]


def places_of(parts) -> list[tuple[str, str, object]]:
    """Return what the modules know of their places in the grid: (module, attribute, value)."""
    names = ("context", "pg_collection", "shard", "cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")
    modules = [one for part in parts for one in part.named_modules()]
    return [(place, name, vars(one)[name]) for place, one in modules for name in names if name in vars(one)]


@torch.no_grad()
def packed_scores(
    folder: Path, pairs: list[tuple[np.ndarray, list[int]]], place: Place = Place("one process")
) -> list[np.ndarray]:
    """Return ln p of every completion's tokens from the packed forward, all in one pack."""
    from mkd.models.packed import packed_documents

    context, (model,) = load_parts(folder, place)
    joins = context.platform.transformer_engine
    documents = [np.concatenate([prompt, ids]) for prompt, ids in pairs]
    borders = torch.tensor(np.cumsum([0, *map(len, documents)]), dtype=torch.int32, device=context.device)
    packed = packed_documents(borders, borders, max(map(len, documents)), joins)
    tokens = torch.from_numpy(np.concatenate(documents))[None].to(context.device)
    logits = model.eval().logits(model(tokens, tokens, packed_seq_params=packed))[:, 0, :VOCAB_SIZE]
    log_p = logits.double().log_softmax(1).cpu()
    scores = []
    for begin, (prompt, ids) in zip(borders.tolist(), pairs, strict=False):
        rows = torch.arange(len(ids)) + begin + len(prompt) - 1
        scores.append(log_p[rows, torch.tensor(ids)].numpy())
    return scores
