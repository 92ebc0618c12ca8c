"""Turn a Megatron distributed checkpoint into a Hugging Face folder: weights, index, configuration, tokenizer files.

Any checkpoint of mkd carries its configuration and tokenizer; for others name the model's folder with --reference-hf.
One process does any model that fits in memory; under torchrun the parallel sizes split it. They need not be the ones of
the run that saved it, and do not change the result.

    python tools/convert_mcore_to_hf.py --load CKPT --hf-out DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from megatron.core import dist_checkpointing

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkd.checkpoint.distributed import (  # noqa: E402
    HF_FOLDER,
    TrainingState,
    find_checkpoint,
    load_checkpoint,
)
from mkd.checkpoint.hf_assets import HFAssets  # noqa: E402
from mkd.checkpoint.hf_reader import resolve_hf  # noqa: E402
from mkd.checkpoint.hf_writer import export_hf  # noqa: E402
from mkd.checkpoint.verifying import verify  # noqa: E402
from mkd.errors import CheckpointError  # noqa: E402
from mkd.plan.model_shape import ModelShape  # noqa: E402
from tools.convert_hf_to_mcore import DTYPES, add_layout_arguments, build_model, join, run_tool  # noqa: E402


def locate(load: Path, step: int | None, reference_hf: str | None) -> tuple[Path, Path]:
    """(iteration folder, Hugging Face folder that describes the model)."""
    folder = find_checkpoint(load, step)
    if folder is None:
        raise CheckpointError(
            f"--load {load} holds no checkpoint",
            "neither the folder nor an iter_* folder in it is one",
            "name a folder that --save has written to",
        )
    if reference_hf is not None:
        return folder, resolve_hf(reference_hf)
    if not (folder / HF_FOLDER / "config.json").exists():
        raise CheckpointError(
            f"{folder} does not say what model it is",
            f"it has no {HF_FOLDER}/config.json",
            "name the Hugging Face folder of the model with --reference-hf",
        )
    return folder, folder / HF_FOLDER


def saved_dtype(folder: Path) -> torch.dtype:
    """The dtype of the weights in a checkpoint, as its embedding has it; fp32 when there is no such entry."""
    embedding = dist_checkpointing.load_tensors_metadata(str(folder)).get("embedding.word_embeddings.weight")
    return torch.float32 if embedding is None else embedding.dtype


def convert(args: argparse.Namespace) -> None:
    """Load at the layout of this world, export."""
    folder, reference = locate(args.load, args.ckpt_step, args.reference_hf)
    shape = ModelShape.from_hf_dir(reference)
    context = join(args)
    verify(folder, context, print)  # before anything of it is unpickled
    dtype = DTYPES[args.dtype] if args.dtype else saved_dtype(folder)
    chunk = build_model(shape, dtype, context)
    load_checkpoint(folder, TrainingState([chunk]), context, is_verified=True)
    export_hf([(chunk, chunk.first_layer)], shape, args.hf_out, context=context, assets=HFAssets.of(reference))
    if context.rank == 0:
        print(f"exported {folder} as {str(dtype).removeprefix('torch.')} to {args.hf_out}")
    context.leave()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=Path, required=True, metavar="CKPT", help="folder of --save, or one iter_* folder")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to export (default: the latest)")
    parser.add_argument("--hf-out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--reference-hf", metavar="DIR_OR_ID", help="configuration and tokenizer (default: CKPT's own)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the files (default: as in the checkpoint)")
    add_layout_arguments(parser)
    return run_tool(convert, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
