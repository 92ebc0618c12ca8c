"""Check GPT-OSS in training: rows of the invariance table, and a stop with expert parallelism."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint.saved_tensors import all_tensors
from tests.tiny_models import add_tokenizer
from tests.train.invariance import Layout, errors_of, require_equal, run_layout
from tests.train.moe_invariance import BALANCE, EP2, GPT_OSS_LAYOUTS, make_gpt_oss_pair
from tests.train.test_resume import STEPS, argv, train_and_hash

UPDATES = 2  # the table has more
QUICK = {"EP2 TP2 DP2 + SP, distributed optimizer, micro-batch 2", "EP2 PP2 VPP2, full recomputation"}
EP2_DISTRIBUTED = (*EP2, "--use-distributed-optimizer")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss")
    student, teacher = make_gpt_oss_pair(folder)
    add_tokenizer(teacher)
    lines = (f'{{"text": "document {i}: {"the quick brown fox " * (i % 7 + 1)}"}}\n' for i in range(60))
    (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder, student, teacher


@pytest.fixture(scope="module")
def reference(ranks, pair):
    folder, student, teacher = pair
    single = Layout("one process", flags=BALANCE)
    (sums,) = ranks.run(run_layout, 1, single, student, teacher, folder / "single", UPDATES)
    return sums


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(one, id=one.name, marks=[] if one.name in QUICK else pytest.mark.slow)
        for one in GPT_OSS_LAYOUTS
    ],
)
def test_layout_equals_one_process(layout, pair, reference, ranks):
    folder, student, teacher = pair
    layout = layout.with_flags(BALANCE)
    results = ranks.run(run_layout, layout.ranks, layout, student, teacher, folder / "layout", UPDATES)
    require_equal(errors_of(results, folder, reference))


def test_the_quick_layouts_are_in_the_table():
    assert {layout.name for layout in GPT_OSS_LAYOUTS} > QUICK


def test_resume_is_bitwise_and_one_process_loads_it(pair, ranks):
    files, *_ = pair
    straight = ranks.run(train_and_hash, 2, argv(files, "whole", *EP2_DISTRIBUTED))
    half = argv(files, "half", *EP2_DISTRIBUTED, "--exit-interval", STEPS // 2)
    ranks.run(train_and_hash, 2, half, files / "half hf")
    again = argv(files, "half", *EP2_DISTRIBUTED, "--load", files / "half")
    assert ranks.run(train_and_hash, 2, again) == straight
    stop = ("--load", files / "half", "--ckpt-step", STEPS // 2, "--train-iters", STEPS // 2)
    ranks.run(
        train_and_hash, 1, argv(files, "alone", *stop, "--use-distributed-optimizer"), files / "alone hf"
    )
    saved, loaded = all_tensors(files / "half hf"), all_tensors(files / "alone hf")
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
