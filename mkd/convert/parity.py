"""Comparison of the logits of mkd and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mkd.checkpoint.distributed import TrainingState, load_checkpoint
from mkd.checkpoint.hf.hf_hub import resolve_hf
from mkd.checkpoint.hf.hf_tower import model_type_of
from mkd.checkpoint.rounded_runs import require_exact_model
from mkd.convert.conversion_checks import locate
from mkd.convert.models import build_model, load_from_hf
from mkd.convert.reference_model import one_expert_at_a_time
from mkd.errors import CheckpointError, UsageError, first_line
from mkd.families.vision import WITH_IMAGES
from mkd.models.language_model import LanguageModel
from mkd.models.packed import packed_documents
from mkd.parallel.context import ParallelContext
from mkd.plan.models.model_shape import ModelShape
from mkd.platform import detect
from mkd.progress_bars import without_progress_bars


@dataclass(frozen=True)
class Parity:
    """Differences of two sets of logits over the same positions."""

    max_logit_difference: float
    max_logit: float  # largest |logit| of the reference
    kl: float  # mean KL(reference || other) in nats per token
    top1_agreement: float  # proportion of positions with the same most likely token

    @property
    def relative_difference(self) -> float:
        """Largest difference of two logits, relative to the largest |logit| of the reference."""
        return self.max_logit_difference / self.max_logit

    @classmethod
    def from_logits(cls, reference: Tensor, other: Tensor) -> Parity:
        """Compare logits, both [n, v] float. KL is summed in fp64, so that rounding hides nothing."""
        kl = 0.0
        for p, q in zip(reference.split(64), other.split(64), strict=True):
            log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
            kl += (log_p.exp() * (log_p - log_q)).sum().item()
        return cls(
            max_logit_difference=(reference - other).abs().max().item(),
            max_logit=reference.abs().max().item(),
            kl=kl / len(reference),
            top1_agreement=(reference.argmax(-1) == other.argmax(-1)).double().mean().item(),
        )


def random_documents(vocab_size: int, num_documents: int, num_tokens: int, seed: int) -> list[Tensor]:
    """Return documents, each int64 [n], of uniformly random ids; n is `num_tokens`, a half, a third ..."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [max(1, num_tokens // i) for i in range(1, num_documents + 1)]
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


@torch.no_grad()
@without_progress_bars()
def transformers_logits(folder: Path, documents: list[Tensor], device: torch.device) -> Tensor:
    """Return logits [tokens of all documents, v] fp32 on the CPU, computed one document at a time."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees_images = model_type_of(folder) in WITH_IMAGES
    loader = AutoModelForImageTextToText if sees_images else AutoModelForCausalLM
    options = dict(dtype=torch.float32, trust_remote_code=False, use_safetensors=True)
    try:
        model = loader.from_pretrained(folder, **options).eval().to(device)
    except Exception as error:  # some checks of transformers raise errors of their own classes
        do = "check config.json and the weights, or name another folder"
        if isinstance(error, ValueError):  # of a model_type that it does not know, as kimi_k2
            do = "give a copy of the folder whose config.json has a model_type it knows, such as deepseek_v3"
        why = first_line(error)
        what = f"transformers cannot load {folder}, so nothing can be compared"
        raise CheckpointError(what, why, do, code="model-config-not-valid") from error
    one_expert_at_a_time(model)
    return torch.cat([model(ids[None].to(device)).logits[0].float().cpu() for ids in documents])


def mkd_logits(model: LanguageModel, documents: list[Tensor], device: torch.device) -> Tensor:
    """Return logits [tokens of all documents, v] fp32 on the CPU, computed with all documents in one pack."""
    return packed_logits(model, documents, device).cpu()


@torch.no_grad()
def packed_logits(model: LanguageModel, documents: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return logits [tokens of all documents, v] fp32 on `device`. All documents are in one pack."""
    lengths = torch.tensor([0, *(len(ids) for ids in documents)])
    borders = lengths.cumsum(0).to(device, torch.int32)
    packed = packed_documents(borders, borders, int(lengths.max()))
    tokens = torch.cat(documents)[None].to(device)
    positions = torch.cat([torch.arange(len(ids)) for ids in documents])[None].to(device)
    hidden = model.eval()(tokens, positions, packed_seq_params=packed)
    return model.logits(hidden)[:, 0, : model.shape.vocab_size].float()


def mkd_model(
    folder: Path, hf_b: str | None, load: Path | None, ckpt_step: int | None, context: ParallelContext
) -> tuple[LanguageModel, Path]:
    """Return (model to compare in fp32, folder of its weights). Raises CheckpointError if `load` has none."""
    if load is not None:
        checkpoint, reference = locate(load, ckpt_step, str(folder))
        model = build_model(ModelShape.from_hf_dir(reference), torch.float32, context)
        require_exact_model(checkpoint)
        load_checkpoint(checkpoint, TrainingState([model]), context)
        return model, checkpoint
    other = resolve_hf(hf_b) if hf_b else folder
    return load_from_hf(other, ModelShape.from_hf_dir(other), torch.float32, context), other


def run(
    hf: str,
    hf_b: str | None,
    load: Path | None,
    ckpt_step: int | None,
    num_documents: int,
    num_tokens: int,
    seed: int,
    tolerance: float,
    kl_tolerance: float,
) -> None:
    """Print the comparison. Arguments are the tool's flags.

    Raises CheckpointError if a difference exceeds its tolerance, the vocabularies differ or `load` has no
    checkpoint, and UsageError for counts below 1.
    """
    if num_tokens < 1 or num_documents < 1:
        what = "--num-tokens and --num-documents must be at least 1"
        raise UsageError(what, "nothing would be compared", "raise them", code="out-of-range")
    folder = resolve_hf(hf)
    context = ParallelContext.create(detect())
    model, other = mkd_model(folder, hf_b, load, ckpt_step, context)
    vocab_size = ModelShape.from_hf_dir(folder).vocab_size
    if model.shape.vocab_size != vocab_size:
        what = f"{folder} has {vocab_size} vocabulary rows, {other} has {model.shape.vocab_size}"
        why, do = "logits are compared id by id", "compare two versions of the same model"
        raise CheckpointError(what, why, do, code="parity-beyond-tolerance")
    documents = random_documents(vocab_size, num_documents, num_tokens, seed)
    found = mkd_logits(model, documents, context.device)
    del model
    parity = Parity.from_logits(transformers_logits(folder, documents, context.device), found)
    print(
        f"transformers on {folder}\nmkd on          {other}\n"
        f"positions       {len(found)}, vocabulary {vocab_size}, fp32"
    )
    absolute, relative = parity.max_logit_difference, parity.relative_difference
    print(f"max |dlogit|    {absolute:.3e}, {relative:.3e} of max |logit|")
    print(f"KL              {parity.kl:.3e} nats per token\ntop-1 agreement {parity.top1_agreement:.6f}")
    context.leave()
    if not (parity.relative_difference <= tolerance and parity.kl <= kl_tolerance):
        raise CheckpointError(
            f"beyond the tolerances: {tolerance:g} of max |logit|, KL {kl_tolerance:g}",
            "the two models compute different functions",
            "expected after training; after a conversion check that both sides are the same model",
            code="parity-beyond-tolerance",
        )
