"""Two image processors in one trained run: the teacher has its own image tokens, chunks of text are compared.

The fixed global batch is real conversations about pictures of several sizes, tokenised, aligned and packed by
the real loader. Three in five conversations have no image. `vision_invariance` prints the tables.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.data.images.tiny_processors import image_file, make_qwen, make_smolvlm, picture
from tests.train.invariance import DISTRIBUTED, NOT_AHEAD, NUM_PACKS, OVERLAP, SP, Layout, measure

SEQ_LENGTH = 192
SPAN_MULTIPLE = 8  # context parallelism of 4 needs it
SIZES = ((40, 40), (60, 20), (16, 16), (24, 50), (9, 9))  # pixels
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")
FLAGS = ("--seq-length", str(SEQ_LENGTH), "--student-train-parts", "text", "projector", "tower")
DELTA_NETS = dict(linear_key_head_dim=4, linear_value_head_dim=6, linear_num_key_heads=4)
DELTA_NETS |= dict(linear_num_value_heads=8, full_attention_interval=2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, mlp_only_layers=[])
EXPERTS |= dict(shared_expert_intermediate_size=12)
UNITS = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "2")
LAYOUTS = (
    Layout("TP2", 2, tp=2),
    Layout("TP4 + SP, micro-batch 2", 4, tp=4, micro=2, flags=SP),
    Layout("PP2", 2, pp=2),
    Layout("PP2 VPP2, micro-batch 2", 2, pp=2, vp=2, micro=2),
    Layout("PP2, units of 2 layers recomputed", 2, pp=2, flags=UNITS),
    Layout("DP2 + overlapped communication", 2, flags=OVERLAP),
    Layout("CP2", 2, cp=2),
    Layout("TP2 CP2 + SP, micro-batch 4", 4, tp=2, cp=2, micro=4, flags=SP),
    Layout("TP2 PP2 DP2 + SP, distributed optimizer", 8, tp=2, pp=2, flags=SP + DISTRIBUTED),
    Layout("PP2 DP2", 4, pp=2),
    Layout("PP2, teacher not ahead", 2, pp=2, flags=NOT_AHEAD),
)


def make_finer_pair(folder: Path) -> tuple[Path, Path]:
    """Make a Qwen2.5-VL student, and a teacher of its tokenizer with four times the image tokens."""
    student = with_weights(make_qwen(folder / "student", most_pixels=16 * 16), seed=1)
    return with_text(student), with_weights(make_qwen(folder / "teacher", most_pixels=32 * 32), seed=2)


def make_mixed_pair(folder: Path) -> tuple[Path, Path]:
    """Make a SmolVLM student, and a Qwen3-VL teacher: another template, other image tokens, deepstack."""
    student = with_weights(make_smolvlm(folder / "student", tiles=2), seed=1)
    return with_text(student), with_weights(make_qwen(folder / "teacher", "Qwen3VL"), seed=2)


def with_weights(folder: Path, seed: int) -> Path:
    """Add random weights of eight decoder layers to a folder of `tiny_processors`; return it."""
    config = json.loads((folder / "config.json").read_text())
    kind, vision = config["model_type"], config["vision_config"]
    config["text_config"] |= dict(num_hidden_layers=8)
    if kind != "smolvlm":
        config["text_config"] |= dict(head_dim=8)
        rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1], partial_rotary_factor=1.0)
        config["text_config"]["rope_parameters"] = rope
        vision |= dict(out_hidden_size=32, intermediate_size=24)
        windows = dict(fullatt_block_indexes=[1], window_size=16)
        vision |= windows if kind == "qwen2_5_vl" else dict(num_position_embeddings=36)
    if kind.startswith("qwen3_vl"):
        vision |= dict(deepstack_visual_indexes=[0, 1])
    if kind.startswith("qwen3_5"):
        config["text_config"] |= DELTA_NETS
    if kind.endswith("_moe"):
        config["text_config"] |= EXPERTS
    for part in (config, config["text_config"]):
        part.pop("layer_types", None)
    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    made.image_token_id = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(
        "<image>" if kind == "smolvlm" else "<|image_pad|>"
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(2)
    model.config.text_config.bos_token_id = model.config.text_config.eos_token_id = 0
    model.save_pretrained(folder)
    return folder


def with_text(student: Path) -> Path:
    """Write pictures and conversations about them into the student's folder; return it."""
    (student / "pictures").mkdir()
    for number, size in enumerate(SIZES):
        (student / "pictures" / f"{number}.png").write_bytes(image_file(picture(*size)))
    random = np.random.default_rng(0)

    def said(most: int) -> str:
        return " ".join(random.choice(WORDS, random.integers(1, most)))

    records = []
    for number in range(40):
        images = [
            {"type": "image", "image": f"{random.integers(len(SIZES))}.png"}
            for _ in range(max(number % 5 - 2, 0))
        ]
        asked = {"role": "user", "content": [*images, {"type": "text", "text": said(5)}]}
        turns = [asked, {"role": "assistant", "content": said(7)}, {"role": "user", "content": said(4)}]
        records.append({"messages": [*turns, {"role": "assistant", "content": said(5)}]})
    (student / "text.txt").write_text("the quick brown fox\n")
    (student / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return student


def run_two_processors(
    layout: Layout, student: Path, teacher: Path, out_dir: Path, num_updates: int = 2
) -> dict:
    """Run one step, an evaluation and some updates on this rank, as `run_layout` does."""
    from mkd.train import optimizer
    from tests.train.vision_invariance import BUCKET_SIZE

    original = optimizer.DistributedDataParallelConfig
    optimizer.DistributedDataParallelConfig = partial(original, bucket_size=BUCKET_SIZE)
    try:
        engine, state, batches = build(layout, student, teacher)
    finally:
        optimizer.DistributedDataParallelConfig = original
    return measure(engine, state, batches, student, out_dir, num_updates)


def build(layout: Layout, student: Path, teacher: Path):
    """Return engine, training state and this rank's micro-batches of the first step."""
    from mkd.config.load import load_config
    from mkd.data.images.row_images import ImageLayout
    from mkd.data.loader import TrainStream
    from mkd.platform import detect
    from mkd.run.build_engine import build_engine
    from mkd.run.one_model import join
    from mkd.run.plan_run import plan_run
    from tests.data.datasets import open_datasets

    argv = [*layout.argv(student, teacher), "--xtoken-loss", "partition_kl"]
    argv += ["--data-path", str(student / "chats.jsonl"), "--image-root", str(student / "pictures")]
    config = load_config([*argv, "--data-cache-path", str(student / "cache")]).config
    plan = plan_run(config, layout.ranks)
    parallel = plan.config.parallel
    context = join(plan.config, plan.facts.pair.sizes, plan.facts.virtual_stages, detect())
    teachers = [one.meet(plan.config, plan.tokenizers, context) for one in plan.setups]
    packs, _ = open_datasets(
        data_path=[str(student / "chats.jsonl")],
        tokenizer=plan.tokenizers.student,
        seq_length=SEQ_LENGTH,
        vocab_size=plan.student.shape.vocab_size,
        cache_dir=str(student / "cache"),
        document_multiple=SPAN_MULTIPLE,
        teachers=[one.text for one in teachers],
        images=plan.tokenizers.images,
        is_builder=context.rank == 0,
        share=context.broadcast_object,
    )
    lengths = zip(teachers, packs.teacher_seq_lengths, strict=True)
    engine, state = build_engine(plan, context, [replace(one, seq_length=length) for one, length in lengths])
    stream = TrainStream(
        packs,
        shuffle=False,
        micro_batch_size=layout.micro,
        global_batch_size=NUM_PACKS,
        data_parallel_rank=context.dp_rank,
        data_parallel_size=context.dp_size,
        shard=context.row_shard,
        images=ImageLayout.of_context(context, parallel.sequence_parallel),
    )
    batches = stream.next_step()
    if layout.ranks == 1:
        require_different_images(batches)
    return engine, state, [batch.to(context.device) for batch in batches]


def require_different_images(batches: list) -> None:
    """Require other numbers of image tokens in both models, micro-batches without images, and chunks."""
    ours = [len(batch.images.rows) for batch in batches]
    theirs = [len(batch.teacher_inputs[0].images.rows) for batch in batches]
    assert sum(ours) > 0 and 0 < sum(theirs) != sum(ours) and 0 in ours, (ours, theirs)
    assert all(batch.teacher_inputs[0].chunks.num_chunks for batch in batches)


TABLES = (
    ("Qwen2.5-VL learns from a teacher with four times the image tokens", make_finer_pair, LAYOUTS, FLAGS),
    ("SmolVLM learns from Qwen3-VL, tower trained", make_mixed_pair, LAYOUTS, FLAGS),
)
