"""Time and memory of a teacher's layers whose experts are codes, beside the same layers in bf16.

    python -m tools.benchmarks.coded_layers                # 4 layers of Qwen3-30B-A3B, 8,192 tokens
    python -m tools.benchmarks.coded_layers --shape tiny-moe --seq-length 64    # on a CPU

Weights are random; `stored` arms hold codes of the form of released checkpoints. "Layers" is what the decoder
layers keep, "of bf16" the same over bf16, and "peak" what a forward without graphs adds. "Error" is the
relative difference of the final hidden state to that in bf16. Times of the single products follow.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mkd.checkpoint.hf.hf_weights import load_hf_weights
from mkd.models.builder import build_model_parts
from mkd.models.coded.coded_product import (
    CodedStack,
    ExpertRows,
    coded_product,
    decoded_stack,
    has_kernel,
    rounded_rows,
    tiled_product,
)
from mkd.models.coded.coded_weights import CodedWeights
from mkd.models.coded.number_codes import BlockCodes, Codes, MXFP4Codes, RowCodes
from mkd.models.graphs.graph_memory import GraphMemory
from mkd.models.graphs.graphed_decoder import GraphedDecoder
from mkd.models.language_model import LanguageModel
from mkd.models.moe.grouped_product import grouped_mm
from mkd.models.packed import PackedDocuments
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.context import ParallelContext
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.stored_experts import BLOCK
from mkd.platform import detect
from tools.benchmarks.benchmark_report import table
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, peak_bytes, time_arms
from tools.benchmarks.random_engine import RandomCheckpoint
from tools.benchmarks.shapes import shape_of

GIB = 2**30


@dataclass(frozen=True)
class RandomMXFP4(MXFP4Codes):
    """Random codes in place of those of a matrix, about as large."""

    def encode(self, matrix: Tensor, codes: Tensor, scales: Tensor) -> None:
        codes.random_(0, 256)
        scales.fill_(120)


FORMS: dict[str, Codes | None] = {
    "bf16": None,
    "fp8 tensorwise": RowCodes(input_group=0),
    "fp8 blockwise": BlockCodes(input_group=BLOCK),
    "stored, FP8 blocks": BlockCodes(),
    "stored, MXFP4": RandomMXFP4(),
}


@dataclass
class Built:
    """One teacher."""

    model: LanguageModel
    layer_bytes: int  # that its decoder layers keep

    @property
    def experts(self) -> nn.Module:
        return self.model.decoder.layers[0].mlp.experts


def build(name: str, form: Codes | None, context: ParallelContext) -> Built:
    shape = shape_of(name)
    layout = PipelineLayout.even(shape.num_layers, 1)
    options = ModelOptions(dtype=torch.bfloat16, releases_layers=form is not None)
    (model,) = build_model_parts(shape, layout, options, context)
    weights = None if form is None else CodedWeights([model], form, keeps_files=False)
    source: Any = RandomCheckpoint(shape, context.device)
    memory = None if weights is None else lambda layer: weights.loading(model.decoder.layers[layer])
    load_hf_weights(model, shape, source, context, layer_memory=memory)
    model.eval().requires_grad_(False)
    if weights is None:
        kept = sum(parameter.nbytes for parameter in model.decoder.parameters())
    else:
        kept = sum(tensor.nbytes for layer in model.decoder.layers for tensor in weights.tensors(layer))
    return Built(model, kept)


def graph_layers(model: LanguageModel) -> None:
    """Let the layers run as CUDA graphs, as they do in a run."""
    decoder, angles = model.decoder, model.rotary_pos_emb
    model.graphs = GraphedDecoder(decoder, "the teacher", angles, GraphMemory())


def forward(model: LanguageModel, tokens: Tensor, packed: PackedDocuments) -> Tensor:
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return model(tokens, positions, packed_seq_params=packed)


@torch.no_grad()
def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    platform = detect()
    context = ParallelContext.create(platform)
    machine = Machine(context.device, torch.bfloat16, args.rounds, seed=0, compile=False)
    from tests.models.test_hf_parity import pack

    quarter = args.seq_length // 4
    packed = pack((quarter,) * 4, 0, platform.transformer_engine, context.device)
    generator = torch.Generator().manual_seed(0)
    vocab = shape_of(args.shape).vocab_size
    tokens = torch.randint(vocab, (1, 4 * quarter), generator=generator).to(context.device)
    rows, built = [], {}
    moe = shape_of(args.shape).moe
    fits = moe.ffn_hidden_size % 32 == 0  # else a row of MXFP4 would end within a group
    for name, form in FORMS.items():
        if isinstance(form, MXFP4Codes) and not fits:
            continue
        built[name] = build(args.shape, form, context)
        gc.collect()
    states = {name: forward(one.model, tokens, packed).float() for name, one in built.items()}
    arms = [Arm(name, lambda model=one.model: forward(model, tokens, packed)) for name, one in built.items()]
    peaks = {arm.name: peak_bytes(arm, context.device) for arm in arms}
    if machine.is_cuda:  # without graphs, the CPU is the limit here
        for one in built.values():
            graph_layers(one.model)
    times = time_arms(arms, context.device, args.rounds)
    exact = states["bf16"]
    for arm in arms:
        one, state = built[arm.name], states[arm.name]
        error = "" if "MXFP4" in arm.name else f"{float((state - exact).norm() / exact.norm()):.4f}"
        kept, first = one.layer_bytes, built["bf16"].layer_bytes
        row = [arm.name, f"{times[arm.name]:.2f}", f"{times[arm.name] / times['bf16']:.3f}"]
        row += [f"{kept / GIB:.3f}", f"{kept / first:.3f}"]
        rows.append([*row, f"{peaks[arm.name] / GIB:.3f}", error])
    columns = ["", "forward, ms", "ratio", "layers, GiB", "of bf16", "peak, GiB", "error"]
    title = f"{args.shape}, {4 * quarter} tokens"
    print(machine.describe(), table(title, columns, rows), sep="\n", flush=True)
    if machine.is_cuda:
        print(product_times(built, machine, 4 * quarter * moe.top_k))
    context.close()
    return 0


def product_times(built: dict[str, Built], machine: Machine, rows: int) -> str:
    """Return a table of the two products of a layer, with as many rows for each expert."""
    found = []
    for number in ("first", "second"):
        stacks = {name: getattr(one.experts, number) for name, one in built.items() if name != "bf16"}
        found += [[f"{number}: {row[0]}", *row[1:]] for row in times_of(stacks, machine, rows)]
    return table("products of a layer", ["", "ms", "of bf16", "TFLOP/s"], found)


def times_of(stacks: dict[str, CodedStack], machine: Machine, rows: int) -> list[list[str]]:
    """Return a row for each way to compute one product, and for parts of it."""
    assert all(map(has_kernel, stacks.values()))
    by_rows, by_blocks = stacks["fp8 tensorwise"], stacks["fp8 blockwise"]
    x = torch.randn(rows, by_rows.columns, device=machine.device, dtype=torch.bfloat16)
    counts = torch.full((by_rows.size,), rows // by_rows.size, device=machine.device)
    of_experts = ExpertRows.of(counts, machine.device)
    matrices = decoded_stack(stacks["stored, FP8 blocks"])
    of_rows, of_blocks = rounded_rows(x, 0), rounded_rows(x, BLOCK)
    arms = [
        Arm("bf16", lambda: grouped_mm(x, matrices.transpose(1, 2), offs=of_experts.ends)),
        Arm("round rows", lambda: rounded_rows(x, 0)),
        Arm("round blocks", lambda: rounded_rows(x, BLOCK)),
        Arm("tiles, rows", lambda: tiled_product(*of_rows, of_experts, by_rows, x.dtype)),
        Arm("tiles, blocks", lambda: tiled_product(*of_blocks, of_experts, by_blocks, x.dtype)),
        *(
            Arm(name, lambda stack=stack: coded_product(x, of_experts, stack))
            for name, stack in stacks.items()
        ),
    ]
    times = time_arms(arms, machine.device, machine.rounds)
    flops = 2 * rows * by_rows.rows * by_rows.columns
    return [
        [
            name,
            f"{ms:.3f}",
            f"{ms / times['bf16']:.2f}",
            "" if name.startswith("round") else f"{flops / ms / 1e9:.0f}",
        ]
        for name, ms in times.items()
    ]


def parser() -> argparse.ArgumentParser:
    """Build the parser."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = flags.add_argument
    add("--shape", default="qwen3-30b-a3b:4", help="teacher's shape in tools/benchmarks/shapes.py")
    add("--seq-length", type=int, default=8192, help="tokens of a forward, a multiple of 32")
    add("--rounds", type=int, default=10, help="timed calls of each arm")
    return flags


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
