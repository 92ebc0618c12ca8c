"""Compare a model in mkd with the same model in transformers: logits of random documents, both in fp32.

The reference is always transformers on --hf. mkd runs the weights of --load (a Megatron checkpoint), of --hf-b (another
Hugging Face folder), or of --hf itself. Exit code 0 within the tolerances, 66 beyond.

    python tools/check_parity.py --hf DIR
    python tools/check_parity.py --hf DIR --hf-b EXPORTED_DIR
    python tools/check_parity.py --hf DIR --load CKPT
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkd.checkpoint.distributed import TrainingState, load_checkpoint  # noqa: E402
from mkd.checkpoint.hf_reader import resolve_hf  # noqa: E402
from mkd.errors import CheckpointError, UsageError  # noqa: E402
from mkd.models.language_model import LanguageModel  # noqa: E402
from mkd.models.packed import packed_documents  # noqa: E402
from mkd.parallel.context import ParallelContext  # noqa: E402
from mkd.plan.model_shape import ModelShape  # noqa: E402
from mkd.platform import detect  # noqa: E402
from tools.convert_hf_to_mcore import build_model, load_from_hf, run_tool  # noqa: E402
from tools.convert_mcore_to_hf import locate  # noqa: E402


@dataclass(frozen=True)
class Parity:
    """How far two sets of logits over the same positions are apart."""

    max_logit_difference: float
    max_logit: float  # largest |logit| of the reference
    kl: float  # mean KL(reference || other) in nats per token
    top1_agreement: float  # proportion of positions with the same most likely token

    @property
    def relative_difference(self) -> float:
        return self.max_logit_difference / self.max_logit

    @classmethod
    def between(cls, reference: Tensor, other: Tensor) -> Parity:
        """Both [n, v] float. KL is summed in fp64: at equality the terms of fp32 would hide what is looked for."""
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
    """Documents of uniformly random ids and falling lengths: `num_tokens`, a half, a third ..., each int64 [n]."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [max(1, num_tokens // i) for i in range(1, num_documents + 1)]
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def transformers_logits(folder: Path, documents: list[Tensor], device: torch.device) -> Tensor:
    """[tokens of all documents, v] fp32 on the CPU, one document at a time."""
    from transformers import AutoModelForCausalLM

    options = dict(dtype=torch.float32, trust_remote_code=False, use_safetensors=True)
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval().to(device)
    return torch.cat([model(ids[None].to(device)).logits[0].float().cpu() for ids in documents])


@torch.no_grad()
def mkd_logits(model: LanguageModel, documents: list[Tensor], device: torch.device) -> Tensor:
    """[tokens of all documents, v] fp32 on the CPU, all documents in one pack."""
    lengths = torch.tensor([0, *(len(ids) for ids in documents)])
    borders = lengths.cumsum(0).to(device, torch.int32)
    packed = packed_documents(borders, borders, int(lengths.max()))
    tokens = torch.cat(documents)[None].to(device)
    positions = torch.cat([torch.arange(len(ids)) for ids in documents])[None].to(device)
    hidden = model.eval()(tokens, positions, None, packed_seq_params=packed)
    return model.logits(hidden)[:, 0, : model.shape.vocab_size].float().cpu()


def mkd_model(args: argparse.Namespace, folder: Path, context: ParallelContext) -> tuple[LanguageModel, Path]:
    """(the model in question, in fp32; where its weights come from)."""
    if args.load is not None:
        checkpoint, reference = locate(args.load, args.ckpt_step, str(folder))
        model = build_model(ModelShape.from_hf_dir(reference), torch.float32, context)
        load_checkpoint(checkpoint, TrainingState([model]), context)
        return model, checkpoint
    other = resolve_hf(args.hf_b) if args.hf_b else folder
    return load_from_hf(other, ModelShape.from_hf_dir(other), torch.float32, context), other


def check(args: argparse.Namespace) -> None:
    """Print the comparison; raises CheckpointError when it is beyond a tolerance."""
    if args.num_tokens < 1 or args.num_documents < 1:
        raise UsageError("--num-tokens and --num-documents must be at least 1", "nothing would be compared", "raise them")
    folder = resolve_hf(args.hf)
    context = ParallelContext.create(detect())
    model, other = mkd_model(args, folder, context)
    vocab_size = ModelShape.from_hf_dir(folder).vocab_size
    if model.shape.vocab_size != vocab_size:
        what = f"{folder} has {vocab_size} vocabulary rows, {other} has {model.shape.vocab_size}"
        raise CheckpointError(what, "logits are compared id by id", "compare two versions of the same model")
    documents = random_documents(vocab_size, args.num_documents, args.num_tokens, args.seed)
    found = mkd_logits(model, documents, context.device)
    del model
    parity = Parity.between(transformers_logits(folder, documents, context.device), found)
    print(f"transformers on {folder}\nmkd on          {other}\npositions       {len(found)}, vocabulary {vocab_size}, fp32")
    print(f"max |dlogit|    {parity.max_logit_difference:.3e}, {parity.relative_difference:.3e} of max |logit|")
    print(f"KL              {parity.kl:.3e} nats per token\ntop-1 agreement {parity.top1_agreement:.6f}")
    context.leave()
    if not (parity.relative_difference <= args.tolerance and parity.kl <= args.kl_tolerance):
        raise CheckpointError(
            f"beyond the tolerances: {args.tolerance:g} of max |logit|, KL {args.kl_tolerance:g}",
            "the two are not the same function",
            "expected after training; after a conversion check that both sides come from the same model and version",
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", required=True, metavar="DIR_OR_ID", help="reference, run by transformers")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--load", type=Path, metavar="CKPT", help="Megatron checkpoint for mkd")
    source.add_argument("--hf-b", metavar="DIR_OR_ID", help="Hugging Face weights for mkd (default: those of --hf)")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration of --load (default: the latest)")
    parser.add_argument("--num-documents", type=int, default=4, metavar="N", help="documents in the pack (default 4)")
    parser.add_argument("--num-tokens", type=int, default=64, metavar="N", help="of the longest document (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of the random ids (default 0)")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="max |dlogit| over max |logit| (default 1e-4)")
    parser.add_argument("--kl-tolerance", type=float, default=1e-8, help="nats per token (default 1e-8)")
    return run_tool(check, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
