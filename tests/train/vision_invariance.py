"""Print the table of layouts for models with images: every gradient, the towers' too, is the same everywhere.

`make invariance` prints it after the tables of models of text. Half of the packs have no image, so that some
data-parallel ranks have none at all, and images of several sizes are dealt to the ranks that share a row.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from tests.tiny_vision_models import IMAGE, START, Row, make_document, make_row, make_vision_model, row_images
from tests.train import two_processors
from tests.train.invariance import (
    DISTRIBUTED,
    NUM_PACKS,
    OVERLAP,
    PEERS,
    SP,
    Layout,
    add_text,
    build_layout,
    measure,
)
from tests.train.invariance_tables import print_tables
from tests.train.moe_invariance import EP2

SEQ_LENGTH = 96
BUCKET_SIZE = 5000  # parameters
LENGTH = ("--seq-length", str(SEQ_LENGTH))
ALL_PARTS = (*LENGTH, "--student-train-parts", "text", "projector", "tower")
RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers")
MIXER_RECOMPUTED = ("--recompute-granularity", "selective", "--recompute-modules", "mixer", "moe")
ADAM = ("--adam-eps", "1e-6")  # see test_latent_invariance.py
UNEVEN_EXPERTS = ("--student-pipeline-layout", "3,1", "--teacher-pipeline-layout", "2,6")
UNEVEN = ("--student-pipeline-layout", "3,5", "--teacher-pipeline-layout", "6,2")
BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1")
LAYOUTS = (
    Layout("TP2", 2, tp=2),
    Layout("TP2 + SP", 2, tp=2, flags=SP),
    Layout("TP4 + SP, micro-batch 2", 4, tp=4, micro=2, flags=SP),
    Layout("PP2", 2, pp=2),
    Layout("PP2 uneven", 2, pp=2, flags=UNEVEN),
    Layout("PP2 VPP2", 2, pp=2, vp=2),
    Layout("PP2, units of 2 layers recomputed", 2, pp=2, flags=(*RECOMPUTED, "2")),
    Layout("PP2, units of 4 layers recomputed", 2, pp=2, flags=(*RECOMPUTED, "4")),
    Layout("PP2 VPP2, single layers recomputed", 2, pp=2, vp=2, flags=BLOCK),
    Layout("CP2", 2, cp=2),
    Layout("CP4 micro-batch 4", 4, cp=4, micro=4),
    Layout("DP2", 2),
    Layout("DP2 + overlapped communication", 2, flags=OVERLAP),
    Layout("DP4 + overlapped communication", 4, flags=OVERLAP),
    Layout("TP2 DP2 + distributed optimizer", 4, tp=2, flags=DISTRIBUTED),
    Layout("TP2 CP2", 4, tp=2, cp=2),
    Layout("TP2 CP2 + SP, overlapped communication", 4, tp=2, cp=2, flags=SP + OVERLAP),
    Layout("TP2 PP2 + SP, units of 2 layers recomputed", 4, tp=2, pp=2, flags=SP + (*RECOMPUTED, "2")),
    Layout("TP2 PP2 VPP2 DP2 + SP, overlapped", 8, tp=2, pp=2, vp=2, flags=SP + OVERLAP),
    Layout("PP2 CP2 micro-batch 2", 4, pp=2, cp=2, micro=2),
    Layout("micro-batch 4", micro=4),
)
WINDOW_LAYOUTS = (
    Layout("PP2, teacher on the host", 2, pp=2, flags=("--teacher-residency", "host")),
    Layout("TP2 CP2 DP2 + SP, distributed optimizer", 8, tp=2, cp=2, flags=SP + DISTRIBUTED),
    Layout("DP2, teacher over 2 peers", 2, flags=PEERS[2]),
)
TILE_LAYOUTS = (
    Layout("TP2 + SP", 2, tp=2, flags=SP),
    Layout("TP2 CP2, units of 2 layers recomputed", 4, tp=2, cp=2, flags=(*RECOMPUTED, "2")),
    Layout("PP2 DP2 + overlapped communication", 4, pp=2, flags=OVERLAP),
)

EXPERT_LAYOUTS = (
    Layout("EP2 TP2 CP2 + SP, distributed optimizer", 4, tp=2, cp=2, flags=EP2 + SP + DISTRIBUTED),
    Layout("TP2 + SP, mixer recomputed", 2, tp=2, flags=SP + MIXER_RECOMPUTED),
    Layout("EP2 PP2 DP2 + overlapped communication", 4, pp=2, flags=EP2 + OVERLAP),
    Layout("PP2 VPP2, single layers recomputed", 2, pp=2, vp=2, flags=BLOCK),
    Layout("PP2 uneven", 2, pp=2, flags=UNEVEN_EXPERTS),
    Layout("CP2 micro-batch 2", 2, cp=2, micro=2),
    Layout("EP2, teacher on the host", 2, flags=EP2 + ("--teacher-residency", "host")),
    Layout("micro-batch 4", micro=4),
)
DEEP_EXPERT_LAYOUTS = (
    Layout("EP2 PP2 VPP2, single layers recomputed", 4, pp=2, vp=2, flags=EP2 + BLOCK),
    Layout("EP2 TP2 + SP, micro-batch 2", 2, tp=2, micro=2, flags=EP2 + SP),
    Layout("EP2 CP2", 2, cp=2, flags=EP2),
    Layout("EP2 TP2 CP2 DP2 + SP, overlapped", 8, tp=2, cp=2, flags=EP2 + SP + OVERLAP),
    Layout("PP2, units of 2 layers recomputed", 2, pp=2, flags=(*RECOMPUTED, "2")),
    Layout("DP2, teacher over 2 peers", 2, flags=PEERS[2]),
)


def make_qwen_pair(folder: Path) -> tuple[Path, Path]:
    """Make a Qwen3-VL student of 8 layers and a wider Qwen2.5-VL teacher with patches of the same size."""
    deep = dict(num_hidden_layers=8)
    wide = dict(num_hidden_layers=8, hidden_size=64, vocab_size=330)
    student = make_vision_model(folder / "student", "qwen3_vl", seed=1, text=deep)
    teacher = make_vision_model(
        folder / "teacher",
        "qwen2_5_vl",
        seed=2,
        text=wide | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])),
        vision=dict(hidden_size=48),
    )
    return add_text(student), teacher


def make_window_pair(folder: Path) -> tuple[Path, Path]:
    """Make a Qwen2.5-VL student, and a Qwen3-VL teacher whose layers take features of its tower."""
    student = make_vision_model(folder / "student", "qwen2_5_vl", seed=1)
    deep = dict(text=dict(num_hidden_layers=8), vision=dict(hidden_size=48))
    return add_text(student), make_vision_model(folder / "teacher", "qwen3_vl", seed=2, **deep)


def make_tile_pair(folder: Path) -> tuple[Path, Path]:
    """Make a SmolVLM student and a wider Idefics3 teacher with tiles of the same size."""
    student = make_vision_model(folder / "student", "smolvlm", seed=1)
    wide = dict(num_hidden_layers=6, hidden_size=64, vocab_size=330)
    return add_text(student), make_vision_model(folder / "teacher", "idefics3", seed=2, text=wide)


def make_expert_pair(folder: Path) -> tuple[Path, Path]:
    """Make a Qwen3.5 student with experts, and a wider Qwen3-VL teacher with experts and deepstack."""
    student = make_vision_model(folder / "student", "qwen3_5_moe", seed=1)
    wide = dict(num_hidden_layers=8, hidden_size=64, vocab_size=330)
    teacher = make_vision_model(
        folder / "teacher", "qwen3_vl_moe", seed=2, text=wide, vision=dict(hidden_size=48)
    )
    return add_text(student), teacher


def make_deep_expert_pair(folder: Path) -> tuple[Path, Path]:
    """Make a Qwen3-VL student with experts behind two layers with deepstack, and a dense Qwen3.5 teacher."""
    student = make_vision_model(
        folder / "student", "qwen3_vl_moe", seed=1, text=dict(num_hidden_layers=8, mlp_only_layers=[0])
    )
    wide = dict(num_hidden_layers=8, hidden_size=64, vocab_size=330)
    return add_text(student), make_vision_model(folder / "teacher", "qwen3_5", seed=2, text=wide)


def rows_of_packs(vision) -> list[Row]:
    """Return the global batch: images of several sizes in every second pack."""
    sizes = [[[(1, 2)], [(1, 1), (1, 1)]], [[(2, 2)]], [[(1, 1)], []]]
    if not vision.image_size:
        sizes = [[[(6, 8)], [(4, 4), (2, 4)]], [[(8, 10)]], [[(2, 2)], [], [(4, 6)]]]
    rows = []
    for index in range(NUM_PACKS):
        images = [[], [], []] if index % 2 else sizes[index // 2 % 3]
        documents = [make_document(vision, one, seed=10 * index + i) for i, one in enumerate(images)]
        rows.append(make_row(vision, documents, multiple=8, total=SEQ_LENGTH))
    return rows


def pack_of(row: Row, index: int):
    """Return the row as a pack: random masks, no loss on tokens of an image or in front of them."""
    from mkd.data.batch import Pack
    from mkd.data.teacher_input import SharedTokens

    tokens = row.tokens.numpy()
    labels = np.append(tokens[1:], 0)
    mask = np.random.default_rng(index).random(len(tokens)) < 0.7
    mask &= ~np.isin(labels, (IMAGE, START)) & ~np.isin(np.arange(len(tokens)), row.spans[1:].numpy() - 1)
    lengths, spans = (np.diff(one.numpy()).astype(np.int64) for one in (row.lengths, row.spans))
    place = row.position_ids.numpy()
    mask &= place < np.repeat(lengths, spans) - 1
    mask &= np.arange(len(tokens)) < np.repeat(row.spans[:-1].numpy() + lengths, spans) - 1
    return Pack(tokens, labels, mask.astype(np.float32), lengths, spans, index, (SharedTokens(),))


def vision_batches(layout: Layout, context, vision) -> list:
    """Return this rank's share of the global batch, with its share of the images."""
    from mkd.data.batch import collate

    rows = rows_of_packs(vision)
    groups = [range(start, start + layout.micro) for start in range(0, NUM_PACKS, layout.micro)]
    batches = []
    for group in groups[context.dp_rank :: context.dp_size]:
        batch = collate([pack_of(rows[index], index) for index in group])
        place = dict(cp_rank=context.cp_rank, cp=context.cp_size, tp_rank=context.tp_rank, tp=context.tp_size)
        is_sharded = "--sequence-parallel" in layout.flags
        images = row_images([rows[index] for index in group], sequence_parallel=is_sharded, **place)
        shard = batch.shard(context.row_shard)
        batches.append(replace(shard, images=images).to(context.device))
    return batches


def run_vision_layout(
    layout: Layout, student: Path, teacher: Path, out_dir: Path, num_updates: int = 2
) -> dict:
    """Run one step, an evaluation and some updates on this rank, as `run_layout` does.

    Gradients are reduced, and parameters gathered, in many buckets: one would hide a tower that leaves some
    of them out on a rank without images.
    """
    from mkd.train import optimizer

    original = optimizer.DistributedDataParallelConfig
    optimizer.DistributedDataParallelConfig = partial(original, bucket_size=BUCKET_SIZE)
    try:
        engine, state, _ = build_layout(layout, layout.argv(student, teacher))
    finally:
        optimizer.DistributedDataParallelConfig = original
    batches = vision_batches(layout, engine.context, state.models[0].shape.vision)
    return measure(engine, state, batches, student, out_dir, num_updates)


TABLES = (
    ("Qwen3-VL learns from Qwen2.5-VL, tower trained", make_qwen_pair, LAYOUTS, ALL_PARTS),
    ("Qwen2.5-VL learns from Qwen3-VL, tower trained", make_window_pair, WINDOW_LAYOUTS, ALL_PARTS),
    ("SmolVLM learns from Idefics3, tower frozen", make_tile_pair, TILE_LAYOUTS, LENGTH),
    (
        "Qwen3.5 learns from Qwen3-VL, both with experts, tower trained",
        make_expert_pair,
        EXPERT_LAYOUTS,
        (*ALL_PARTS, *ADAM),
    ),
    (
        "Qwen3-VL with experts learns from Qwen3.5, tower trained",
        make_deep_expert_pair,
        DEEP_EXPERT_LAYOUTS,
        (*ALL_PARTS, *ADAM),
    ),
)


if __name__ == "__main__":
    failed = print_tables(TABLES, run_vision_layout)
    sys.exit(print_tables(two_processors.TABLES, two_processors.run_two_processors) or failed)
