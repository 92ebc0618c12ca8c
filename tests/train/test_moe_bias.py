"""Check the moves of the correction bias against transformers' own routing, and what leaves it alone."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint.saved_tensors import all_tensors
from tests.fault_injection import fault as injected
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import flags, write_records
from tests.train.invariance import Layout, add_text, build_layout, fixed_packs
from tests.train.moe_invariance import EP2, MOVED

RATE = float(MOVED[1])
BIAS = "mlp.gate.e_score_correction_bias"


def biases(engine) -> dict[int, torch.Tensor]:
    """Return the bias of every layer of this rank's part of the student."""
    return {router.layer_number - 1: router.expert_bias.clone() for router in engine.experts.routers}


def biases_after_a_step(layout, student, teacher):
    from mkd.train.step import train_step

    engine, _, batches = build_layout(layout, layout.argv(student, teacher))
    train_step(engine, batches)
    return biases(engine)


def loads_by_transformers(folder) -> dict[int, torch.Tensor]:
    """Return the tokens of each expert in each layer for the fixed global batch, document by document."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loads: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            load = loads[index] = torch.zeros(layer.mlp.gate.num_experts, dtype=torch.int64)

            def count(gate, args, output, load=load):
                load += output[2].flatten().bincount(minlength=len(load))

            layer.mlp.gate.register_forward_hook(count)
    for pack in fixed_packs(permuted=False):
        for start, length in zip(pack.spans.cumsum() - pack.spans, pack.lengths, strict=True):
            with torch.no_grad():
                model(torch.as_tensor(pack.tokens[start : start + length]).long()[None])
    return loads


@pytest.mark.parametrize("student", ["deepseek-experts", "moonlight-experts"])
def test_the_bias_moves_towards_an_even_load(student, tmp_path, ranks):
    folder = add_text(make_model(tmp_path / "student", student, seed=1))
    teacher = make_model(tmp_path / "teacher", "qwen3", seed=2)
    loads, before = loads_by_transformers(folder), all_tensors(folder)
    found = ranks.run(biases_after_a_step, 2, Layout("EP2", 2, flags=EP2 + MOVED), folder, teacher)
    assert found[0].keys() == found[1].keys() == loads.keys() == {1, 2, 3}
    for layer, load in loads.items():
        move = RATE * (load.double().mean() - load).sign()
        assert move.unique().numel() > 1
        expected = (before[f"model.layers.{layer}.{BIAS}"].double() + move).float()
        assert all(torch.equal(one[layer], expected) for one in found)


def moves_of_steps(argv, fault):
    """Return for every step: whether it updated, and the moves of all biases in units of the rate."""
    import torch.distributed as dist

    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.loop import one_step
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    with injected(fault):
        run = build_run(plan_run(load_config(argv).config, dist.get_world_size()), detect())
        found = []
        for _ in range(run.config.training.train_iters):
            before, skipped = biases(run.engine), run.position.skipped_iterations
            one_step(run)
            moves = torch.stack([bias - before[layer] for layer, bias in biases(run.engine).items()]) / RATE
            found.append((run.position.skipped_iterations == skipped, moves))
        run.reporter.close()
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bias")
    add_tokenizer(make_model(folder / "student", "deepseek-experts", seed=1))
    add_tokenizer(make_model(folder / "teacher", "moonlight-experts", seed=2))
    return write_records(folder / "text.jsonl", *({"text": f"{i}: the quick fox"} for i in range(60))).parent


@pytest.mark.fault(19)
def test_a_skipped_step_leaves_the_bias_alone(files, ranks):
    """Weights are bf16 here; the bias is fp32, so that no small move is lost."""
    more = ("--train-iters", 3, "--non-finite", "skip", "--bf16", *EP2, *MOVED)
    for steps in ranks.run(moves_of_steps, 2, flags(files, "skip", *more), "nan@in_step:1:2"):
        assert [is_applied for is_applied, _ in steps] == [True, False, True]
        assert not steps[1][1].any()
        for _, moves in steps[::2]:
            torch.testing.assert_close(moves, moves.round(), rtol=0, atol=1e-4)
            assert moves.abs().amax(1).tolist() == pytest.approx([1, 1, 1], abs=1e-4)


def test_without_a_rate_the_bias_is_frozen(files, ranks):
    for steps in ranks.run(moves_of_steps, 2, flags(files, "frozen", *EP2), None):
        assert all(is_applied and not moves.any() for is_applied, moves in steps)
