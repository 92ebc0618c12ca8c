"""Turn a Hugging Face model folder into a Megatron distributed checkpoint (iteration 0), for --student-load / --teacher-load.

Training can read the folder itself (--student-hf); convert when Megatron tools need it or many runs start from it.
One process does any model that fits in memory; under torchrun the parallel sizes split it. The result has no layout.

    python tools/convert_hf_to_mcore.py --hf DIR --save CKPT
    torchrun --nproc-per-node 8 tools/convert_hf_to_mcore.py --hf DIR --save CKPT --tensor-model-parallel-size 8
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkd.checkpoint.distributed import (  # noqa: E402
    POINTER,
    TrainingPosition,
    TrainingState,
    save_checkpoint,
)
from mkd.checkpoint.hf_assets import HFAssets  # noqa: E402
from mkd.checkpoint.hf_reader import HFCheckpoint, check_hf_checkpoint, load_hf_weights, resolve_hf  # noqa: E402
from mkd.errors import EXIT_DONE, CheckpointError, MkdError, UsageError  # noqa: E402
from mkd.models.builder import build_chunks  # noqa: E402
from mkd.models.language_model import LanguageModel  # noqa: E402
from mkd.models.transformer_config import ModelOptions  # noqa: E402
from mkd.parallel.context import ParallelContext  # noqa: E402
from mkd.plan.layout import PipelineLayout  # noqa: E402
from mkd.plan.model_shape import ModelShape  # noqa: E402
from mkd.platform import detect  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """The parallel sizes of a conversion; their product is the number of processes."""
    for name in ("tensor", "pipeline"):
        parser.add_argument(
            f"--{name}-model-parallel-size", type=int, default=1, metavar="N", help=f"{name}-parallel ranks (default 1)"
        )


def join(args: argparse.Namespace) -> ParallelContext:
    """The process grid of a conversion. Raises UsageError when the sizes do not make up the world."""
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if tensor * pipeline != world_size:
        raise UsageError(
            f"tensor-model-parallel-size {tensor} x pipeline-model-parallel-size {pipeline} is not {world_size} processes",
            "every rank of a conversion holds one part of the model",
            f"start it with torchrun --nproc-per-node {tensor * pipeline}",
        )
    return ParallelContext.create(detect(), tensor_parallel=tensor, pipeline_parallel=pipeline)


def build_model(shape: ModelShape, dtype: torch.dtype, context: ParallelContext) -> LanguageModel:
    """This rank's part of the model, weights uninitialised; layers are split as evenly as possible."""
    share, more = divmod(shape.num_layers, context.pp_size)
    layers = tuple(share + (stage < more) for stage in range(context.pp_size))
    (chunk,) = build_chunks(shape, PipelineLayout(layers, context.pp_size), ModelOptions(dtype=dtype), context)
    return chunk


def load_from_hf(folder: Path, shape: ModelShape, dtype: torch.dtype, context: ParallelContext) -> LanguageModel:
    """This rank's part of the model in `folder`; reads only its slices."""
    chunk = build_model(shape, dtype, context)
    ranks = dict(tp_rank=context.tp_rank, tp_size=context.tp_size)
    load_hf_weights(chunk, shape, HFCheckpoint(folder), first_layer=chunk.first_layer, **ranks)
    return chunk


def convert(args: argparse.Namespace) -> None:
    """Read, build, save. The checkpoint keeps the dtype of the files unless `--dtype` says otherwise."""
    folder = resolve_hf(args.hf)
    shape, checkpoint = ModelShape.from_hf_dir(folder), HFCheckpoint(folder)
    check_hf_checkpoint(shape, checkpoint)
    if (args.save / POINTER).exists():
        raise CheckpointError(
            f"{args.save} already holds checkpoints",
            "a converted model is iteration 0: the run in that folder would start over",
            "choose an empty folder for --save",
        )
    stored = {header.dtype for header in checkpoint.headers.values()}
    dtype = DTYPES[args.dtype] if args.dtype else torch.bfloat16 if stored == {"BF16"} else torch.float32
    context = join(args)
    state = TrainingState([load_from_hf(folder, shape, dtype, context)])
    saved = save_checkpoint(args.save, state, TrainingPosition(), context, HFAssets.of(folder))
    if context.rank == 0:
        print(f"saved {shape.family}, {shape.num_layers} layers, {str(dtype).removeprefix('torch.')}, to {saved}")
    context.leave()


def run_tool(convert: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Exit code of a tool; a user error is printed once."""
    try:
        convert(args)
    except MkdError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return EXIT_DONE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", required=True, metavar="DIR_OR_ID", help="Hugging Face folder, or model id to download")
    parser.add_argument("--save", type=Path, required=True, metavar="CKPT", help="folder to write iter_0000000 to")
    parser.add_argument("--dtype", choices=DTYPES, help="of the checkpoint (default: bf16 if the files are, else fp32)")
    add_layout_arguments(parser)
    return run_tool(convert, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
