"""Check the gradients of pairs with experts against transformers: routers, every expert and all others."""

from __future__ import annotations

import pytest

from tests.tiny_models import make_model
from tests.train.hf_gradients import reference_gradients
from tests.train.invariance import (
    SP,
    TOLERANCE,
    Layout,
    add_text,
    build_layout,
    export_gradients,
    worst_relative_error,
)
from tests.train.moe_invariance import EP2, ON_HOST

TEACHER_EP2 = ("--teacher-expert-model-parallel-size", "2")
PAIRS = {  # student, teacher, layout
    "Qwen3-MoE from a dense teacher": ("qwen3_moe", "qwen3", Layout("EP2", 2, micro=2, flags=EP2)),
    "Mixtral from Qwen3-MoE": ("mixtral", "qwen3_moe", Layout("EP2 PP2", 4, pp=2, flags=EP2)),
    "DeepSeek-V3 from Mixtral": ("deepseek-experts", "mixtral", Layout("EP2 SP", 2, tp=2, flags=EP2 + SP)),
    "a dense student from DeepSeek-V3": (
        *("qwen3", "deepseek-experts"),
        Layout("teacher EP2 CP2", 2, cp=2, flags=TEACHER_EP2),
    ),
}


def gradients(layout, student, teacher, out_dir):
    engine, state, batches = build_layout(layout, layout.argv(student, teacher))
    return export_gradients(engine, state, batches, student, out_dir)


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_are_those_of_transformers(name, tmp_path, ranks):
    """The teacher with experts gives the same bits from the host."""
    student, teacher, layout = PAIRS[name]
    pair = add_text(make_model(tmp_path / "student", student, seed=1)), tmp_path / "teacher"
    make_model(pair[1], teacher, seed=2)
    expected = reference_gradients(*pair, tmp_path / "reference")
    found = ranks.run(gradients, layout.ranks, layout, *pair, tmp_path / "device")
    assert found[0]["loss"] / found[0]["num_loss_tokens"] == pytest.approx(expected, rel=TOLERANCE)
    error, where = worst_relative_error(tmp_path / "device" / "gradients", tmp_path / "reference")
    assert error <= TOLERANCE, f"{where}: {error:.2e}"
    if teacher in ("qwen3_moe", "deepseek-experts"):
        layout = layout.with_flags(ON_HOST)
        assert ranks.run(gradients, layout.ranks, layout, *pair, tmp_path / "host") == found
        name = "gradients/model.safetensors"
        assert (tmp_path / "host" / name).read_bytes() == (tmp_path / "device" / name).read_bytes()
