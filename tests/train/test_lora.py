"""Check LoRA students: layouts against one process and PEFT in float64; checkpoints of adapters alone."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.saved_tensors import all_tensors
from tests.tiny_models import make_model
from tests.train.hf_gradients import backward_by_document, load
from tests.train.invariance import (
    DISTRIBUTED,
    FULL,
    OVERLAP,
    SELECTIVE,
    SINGLE,
    SP,
    TOLERANCE,
    Layout,
    add_text,
    fixed_packs,
)
from tests.train.lora_run import ALPHA, LORA, RANK, run_base_teacher, run_lora, run_lora_sides, worst_error
from tests.train.sides_run import own_layout
from tests.train.test_moe_resume import HALF, save_again, saved_tensors
from tests.train.test_resume import STEPS, argv, files, train_and_hash  # noqa: F401

LAYOUTS = (
    Layout("TP2 + SP, full recomputation", 2, tp=2, flags=SP + FULL),
    Layout("PP2 VPP2 CP2, selective recomputation", 4, pp=2, vp=2, cp=2, flags=SELECTIVE),
    Layout("TP2 PP2 distributed", 4, tp=2, pp=2, flags=DISTRIBUTED),
    Layout("DP2 overlapped", 2, flags=OVERLAP),
    Layout("TP4 micro-batch 4", 4, tp=4, micro=4),
)
QUICK = LAYOUTS[:2]


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    heads = dict(num_attention_heads=6, num_key_value_heads=3, head_dim=8)  # padded at TP2
    student = make_model(folder / "student", "qwen3", seed=1, tie_word_embeddings=True, **heads)
    teacher = make_model(folder / "teacher", "llama", seed=2, num_hidden_layers=8, hidden_size=72)
    pair = add_text(student), teacher
    (single,) = ranks.run(run_lora, 1, SINGLE, *pair, folder / "single")
    return folder, pair, single


@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, id=one.name, marks=[] if one in QUICK else pytest.mark.slow) for one in LAYOUTS],
)
def test_layout_equals_one_process(layout, reference, ranks):
    """Every gradient, the adapters after two updates, and the merged student."""
    folder, pair, single = reference
    results = ranks.run(run_lora, layout.ranks, layout, *pair, folder / "layout")
    assert all(result == results[0] for result in results)
    require_equal_runs(results[0], single, folder)


def require_equal_runs(found: dict, single: dict, folder) -> None:
    """Check a run in `folder` / layout against one process."""
    for part in ("sums", "evaluation", "last"):
        for name in ("loss", "ce", "kd", *(["grad_norm"] if part == "last" else [])):
            assert found[part][name] == pytest.approx(single[part][name], rel=TOLERANCE), (part, name)
    for part in ("gradients", "updated", "merged"):
        error, where = worst_error(folder / "layout" / part, folder / "single" / part)
        assert error <= TOLERANCE, (part, where)


@pytest.mark.slow
def test_a_teacher_on_processes_of_its_own(reference, ranks, tmp_path):
    folder, pair, single = reference
    student, flags = Layout("s", 2, tp=2, flags=SP), own_layout(1)
    found, *_ = ranks.run(run_lora_sides, 3, student, *pair, flags, tmp_path, folder / "layout")
    require_equal_runs(found, single, folder)


def test_every_adapter_has_a_gradient(reference):
    folder, _, _ = reference
    gradients = load_file(folder / "single/gradients/adapter_model.safetensors")
    assert len(gradients) == 4 * 2 * 7
    assert [name for name, one in gradients.items() if not one.abs().max() > 0] == []


def test_merged_export_is_base_plus_adapters(reference):
    """In fp32, cast once; nothing else has changed."""
    folder, (student, _), _ = reference
    merged, base = all_tensors(folder / "single/merged"), all_tensors(student)
    adapters = load_file(folder / "single/updated/adapter_model.safetensors")
    assert merged.keys() == base.keys()
    changed = 0
    for name, tensor in merged.items():
        start = f"base_model.model.{name.removesuffix('.weight')}"
        expected = base[name]
        if f"{start}.lora_A.weight" in adapters:
            product = adapters[f"{start}.lora_B.weight"] @ adapters[f"{start}.lora_A.weight"]
            expected, changed = torch.add(expected, product, alpha=ALPHA / RANK), changed + 1
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)
    assert changed == 4 * 7


def test_peft_in_float64_has_the_same_loss_gradients_and_logits(reference):
    """PEFT on transformers reads the folder. A of queries, keys and values is one here: gradients add up."""
    peft = pytest.importorskip("peft")
    folder, (student, teacher), single = reference
    started = folder / "single/started"
    model = peft.PeftModel.from_pretrained(load(student), started, is_trainable=True).double()
    other = load(teacher).requires_grad_(False)
    num_tokens = int(sum(pack.loss_mask.sum() for pack in fixed_packs(permuted=False)))
    total = backward_by_document(model, other)
    assert total == pytest.approx(single["sums"]["loss"] / num_tokens, rel=TOLERANCE)
    expected = {
        name.replace(".default", ""): one.grad for name, one in model.named_parameters() if "lora" in name
    }
    ours = load_file(folder / "single/gradients/adapter_model.safetensors")
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        for group in ("qkv", ("gate", "up")):
            if ".lora_A." in name and any(f".{part}_proj." in name for part in group):
                (own,) = (part for part in group if f".{part}_proj." in name)
                parts = [name.replace(f".{own}_proj.", f".{part}_proj.") for part in group]
                gradient = sum(expected[part] for part in parts)
        error = (ours[name].double() - gradient).abs().max() / gradient.abs().max()
        assert error <= TOLERANCE, name
    merged, adapted = load(folder / "single/merged"), load(student)
    adapted = peft.PeftModel.from_pretrained(adapted, folder / "single/updated").double().eval()
    ids = torch.arange(40)[None] + 100
    with torch.no_grad():
        difference = (merged(ids).logits - adapted(ids).logits).abs().max()
        moved = (load(student)(ids).logits - adapted(ids).logits).abs().max()
    assert difference < TOLERANCE < moved


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(SINGLE, id="one process"),
        pytest.param(
            Layout("PP2", 2, pp=2, flags=("--pipeline-layout", "auto")), id="PP2, automatic, teacher ahead"
        ),
        pytest.param(Layout("TP2 + SP", 2, tp=2, flags=SP), id="TP2 + SP", marks=pytest.mark.slow),
    ],
)
def test_the_base_is_a_teacher_without_memory(layout, reference, ranks):
    """At first the divergence is exactly 0; the teacher stays as it is while the student learns."""
    _, (student, _), _ = reference
    results = ranks.run(run_base_teacher, layout.ranks, layout, student)
    assert [result["own"] for result in results] == [0] * layout.ranks
    for result in results:
        first, last = result["first"], result["last"]
        assert first["kd"] == 0 and first["top1_agreement"] == first["num_loss_tokens"]
        assert first["teacher_ce"] == first["ce"] and last["teacher_ce"] == first["teacher_ce"]
        assert last["kd"] > 0
        assert result["buffer"] == result["state"] == result["adapters"]


TP2 = "--tensor-model-parallel-size", 2, "--sequence-parallel", "--use-distributed-optimizer"
PP2 = "--pipeline-model-parallel-size", 2, "--use-distributed-optimizer"


def test_resume_is_bitwise_after_saves_at_other_layouts(files, ranks):  # noqa: F811
    """One process -> TP2 + SP -> PP2 -> one process. Checkpoints hold adapters and their moments alone."""
    common = (*LORA, "--use-distributed-optimizer")
    straight = ranks.run(train_and_hash, 1, argv(files, "whole", *common), files / "whole hf")
    half = argv(files, "half", *common, "--exit-interval", STEPS // 2)
    ranks.run(train_and_hash, 1, half)
    (state,) = ranks.run(saved_tensors, 1, files / "half" / HALF)
    assert any("exp_avg_sq" in name for name in state)
    assert [name for name in state if "lora_" not in name and "optimizer" not in name] == []
    saved = json.loads((files / "half" / HALF / "mkd.json").read_text(encoding="utf-8"))
    adapters = {"rank": RANK, "alpha": ALPHA, "targets": ["qkv", "proj", "fc1", "fc2"]}
    base = {"precision": "bf16", "base": str(files / "student")}
    assert saved["adapters"] == adapters | base
    came_from = "half"
    for run, layout in (("at TP2", TP2), ("at PP2", PP2)):
        ranks.run(save_again, 2, argv(files, run, *LORA, *layout, "--load", files / came_from))
        (found,) = ranks.run(saved_tensors, 1, files / run / HALF)
        assert found.keys() == state.keys()
        assert [name for name in state if not torch.equal(found[name], state[name])] == []
        came_from = run
    resumed = argv(files, "rest", *common, "--load", files / came_from)
    assert ranks.run(train_and_hash, 1, resumed, files / "rest hf") == straight
    whole, rest = all_tensors(files / "whole hf"), all_tensors(files / "rest hf")
    assert all(torch.equal(tensor, rest[name]) for name, tensor in whole.items())
