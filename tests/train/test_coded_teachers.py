"""Check training with teachers whose experts are codes: losses and gradients on layouts, forwards ahead."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.models.coded.quantised_experts import fp8_blocks, mxfp4
from tests.tiny_models import add_tokenizer, make_model
from tests.train.invariance import PEERS, SP, Layout, add_text, errors_of, require_equal, run_layout
from tests.train.moe_invariance import EP2, ON_HOST, make_moe_pair
from tests.train.sides_run import own_layout, run_shared, run_sides
from tests.train.test_teacher_prefetch import train_with_each

STORED = ("--teacher-precision", "stored")
LAYOUTS = (
    Layout("EP2 TP2 + SP, on the host", 2, tp=2, flags=EP2 + SP + ON_HOST),
    Layout("PP2 VPP2", 2, pp=2, vp=2),
    Layout("EP1 DP2, 2 peers", 2, flags=PEERS[2]),
)
SLOW = (
    Layout("EP2 PP2, CP2", 4, pp=2, cp=2, flags=EP2),
    Layout("EP2 TP2 PP2 + SP", 4, tp=2, pp=2, flags=EP2 + SP),
)


@pytest.fixture(scope="module")
def blocks(ranks, tmp_path_factory):
    """Return the student, the teacher in FP8 blocks, and one process with the dequantised teacher."""
    folder = tmp_path_factory.mktemp("coded")
    sizes = dict(num_hidden_layers=4, head_dim=8, mlp_only_layers=[0])
    student = add_text(make_model(folder / "student", "qwen3_moe", seed=1, **sizes))
    (folder / "files").mkdir()
    quantised, plain = (add_tokenizer(one) for one in fp8_blocks(folder / "files", seed=2))
    (single,) = ranks.run(run_layout, 1, Layout("one process"), student, plain, folder / "single", 1)
    return folder, student, quantised, single


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(one, id=one.name, marks=[] if one in LAYOUTS else pytest.mark.slow)
        for one in (*LAYOUTS, *SLOW)
    ],
)
def test_losses_and_gradients_are_those_of_the_dequantised_teacher(layout, blocks, ranks):
    folder, student, quantised, single = blocks
    layout = layout.with_flags(STORED)
    results = ranks.run(run_layout, layout.ranks, layout, student, quantised, folder / "layout", 1)
    require_equal(errors_of(results, folder, single))


def test_mxfp4(ranks, tmp_path):
    student = add_text(make_model(tmp_path / "student", "gpt_oss", seed=1, num_hidden_layers=2))
    quantised, plain = mxfp4(tmp_path)
    (single,) = ranks.run(run_layout, 1, Layout("one process"), student, plain, tmp_path / "single", 1)
    layout = Layout("EP2", 2, flags=EP2 + STORED)
    results = ranks.run(run_layout, 2, layout, student, quantised, tmp_path / "layout", 1)
    require_equal(errors_of(results, tmp_path, single))


@pytest.mark.parametrize(
    "more", [(), ("--teacher-fp8-recipe", "blockwise", *ON_HOST)], ids=["device", "host"]
)
def test_forwards_ahead_have_the_same_bits(more, ranks, tmp_path):
    """Experts in FP8, in the real code: on a CPU the same numbers are computed."""
    pair = make_moe_pair(tmp_path, dict(num_hidden_layers=4))
    layout = Layout("PP2", 2, pp=2, flags=("--teacher-precision", "fp8", "--bf16", *more))
    ranks.run(train_with_each, 2, layout, *pair, (4,))


def test_codes_on_processes_of_their_own(blocks, ranks, tmp_path):
    """The student's process asks two that share every matrix and the experts, which stay as codes."""
    folder, student, quantised, single = blocks
    flags = own_layout(2, tp=2, more=("--teacher-expert-model-parallel-size", "2", *STORED))
    given = Layout("s"), (student, quantised), flags, tmp_path, folder / "layout", 1
    found = ranks.run(run_sides, 3, *given)
    require_equal(errors_of([found[0]["measures"]], folder, single))


@pytest.mark.slow
def test_fp8_experts_on_processes_of_their_own(ranks, tmp_path):
    """The same numbers as on the student's process."""
    pair, fp8 = make_moe_pair(tmp_path), ("--teacher-precision", "fp8")
    student = Layout("s", flags=("--bf16",))
    (single,) = ranks.run(run_shared, 1, student.with_flags(fp8), pair, tmp_path / "single", 1)
    flags = own_layout(1, more=fp8)
    first, _ = ranks.run(run_sides, 2, student, pair, flags, tmp_path, tmp_path / "layout", 1)
    assert first["measures"] == single
    parts = (tmp_path / name / "gradients" / "model.safetensors" for name in ("single", "layout"))
    expected, gradients = map(load_file, parts)
    assert all(torch.equal(gradients[name], one) for name, one in expected.items())
