"""Check stop, resume and export with experts: bitwise, also after saves at other expert-parallel sizes."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_models import add_tokenizer, make_model
from tests.train.lora_run import LORA
from tests.train.processes import run_processes
from tests.train.saved_state import saved_state
from tests.train.test_resume import STEPS, argv, train_and_hash

EP1, EP2, EP4 = (
    (size, ("--use-distributed-optimizer", "--expert-model-parallel-size", size)) for size in (1, 2, 4)
)
TEACHER_EP2 = ("--teacher-expert-model-parallel-size", 2)
PP2 = ("--pipeline-model-parallel-size", 2)
ROUTING = ("--moe-aux-loss-coeff", 0.01, "--moe-router-bias-update-rate", 0.01)
HALF = f"iter_{STEPS // 2:07d}"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make a DeepSeek-V3 student whose first layer is dense, a Mixtral teacher, and a text."""
    folder = tmp_path_factory.mktemp("moe_resume")
    sizes = dict(vocab_size=300, num_hidden_layers=2)
    add_tokenizer(make_model(folder / "student", "deepseek-experts", seed=1, **sizes))
    add_tokenizer(make_model(folder / "teacher", "mixtral", seed=2, **sizes))
    lines = (f'{{"text": "document {i}: {"the quick brown fox " * (i % 7 + 1)}"}}\n' for i in range(60))
    (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def save_again(arguments):
    """Load the checkpoint of a run at this world's layout, and save it without a step."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    run = build_run(plan_run(load_config(arguments).config, torch.distributed.get_world_size()), detect())
    run.reporter.close()
    assert run.position.iteration == STEPS // 2
    run.saver.save(run.state, run.position, wait=True, open_interval={})


def saved_tensors(folder):
    """Return every tensor of a checkpoint, whole, by name."""
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load_plain_tensors(str(folder))
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


@pytest.mark.fault(1, 23)
def test_resume_is_bitwise_after_saves_at_other_sizes(files, ranks):
    """EP2 -> EP1 -> EP4, teacher EP2 -> EP2: weights, moments and biases arrive as in a run without stops."""
    straight = ranks.run(train_and_hash, 2, argv(files, "whole", *EP2[1], *ROUTING))
    half = argv(files, "half", *EP2[1], *ROUTING, "--exit-interval", STEPS // 2)
    ranks.run(train_and_hash, 2, half, files / "half hf")
    came_from, state = "half", ranks.run(saved_tensors, 1, files / "half" / HALF)[0]
    parts = ("exp_avg_sq", "mlp.router.expert_bias", "mlp.experts")
    assert all(any(part in name for name in state) for part in parts), state.keys()
    for run, (world_size, layout) in (("at EP1", EP1), ("at EP4", EP4)):
        more = TEACHER_EP2 if world_size == 4 else ()
        load = argv(files, run, *layout, *more, *ROUTING, "--load", files / came_from)
        ranks.run(save_again, world_size, load)
        (found,) = ranks.run(saved_tensors, 1, files / run / HALF)
        assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
        came_from = run
    resumed = argv(files, "rest", *EP2[1], *ROUTING, "--load", files / came_from)
    assert ranks.run(train_and_hash, 2, resumed) == straight


@pytest.mark.slow
@pytest.mark.fault(3)
@pytest.mark.parametrize("place", ["mid_shard:1", "before_pointer:0"])
def test_killed_during_a_save(place, files):
    """The next start resumes from the save before, and ends like a run without the kill, bit for bit."""
    states = []
    for run, faults in (("calm", [""]), (f"killed {place[:3]}", [f"kill@{place}:4", ""])):
        save = files / run
        more = ("--save-interval", 2, "--load", save, *EP2[1], *ROUTING)
        for fault in faults:
            ended = run_processes(files, argv(files, run, *more), 2, fault=fault)
            assert [one.code == 0 for one in ended] == [not fault] * 2, ended[0].output[-1500:]
        states.append(saved_state(save / f"iter_{STEPS:07d}"))
    assert states[0] == states[1]


@pytest.mark.slow
def test_a_stage_without_experts_resumes(files, ranks):
    """The first stage, which saves the number of steps, has the dense layer alone."""
    straight = ranks.run(train_and_hash, 2, argv(files, "stages whole", *PP2))
    ranks.run(train_and_hash, 2, argv(files, "stages", *PP2, "--exit-interval", STEPS // 2))
    assert ranks.run(train_and_hash, 2, argv(files, "stages", *PP2, "--load", files / "stages")) == straight


def test_saves_by_time_are_those_of_a_run_with_experts(files, ranks):
    """Saves after some milliseconds change nothing, and the run goes on from the first."""
    more = *EP2[1], *ROUTING
    straight = ranks.run(train_and_hash, 2, argv(files, "untimed", *more))
    timed = *more, "--save-interval-in-mins", 1e-6, "--keep-checkpoints", 10
    assert ranks.run(train_and_hash, 2, argv(files, "timed", *timed)) == straight
    saved = sorted(path.name for path in (files / "timed").glob("iter_*"))
    assert saved[-1] == f"iter_{STEPS:07d}" and len(saved) > 1, saved
    again = argv(files, "timed", *more, "--load", files / "timed", "--ckpt-step", int(saved[0][5:]))
    assert ranks.run(train_and_hash, 2, again) == straight


@pytest.mark.slow
def test_adapters_beside_experts_resume_after_saves_at_other_layouts(files, ranks):
    """EP2 -> TP2 + SP -> PP2 -> one process -> EP2, of adapters and their moments alone."""
    heads = dict(num_attention_heads=4, num_key_value_heads=4)  # none is added at TP2
    sizes = dict(vocab_size=300, num_hidden_layers=2)
    student = add_tokenizer(make_model(files / "even", "deepseek-experts", seed=1, **sizes, **heads))
    adapters = *LORA, "--student-hf", student
    straight = ranks.run(train_and_hash, 2, argv(files, "adapters", *EP2[1], *adapters))
    half = argv(files, "adapters half", *EP2[1], *adapters, "--exit-interval", STEPS // 2)
    ranks.run(train_and_hash, 2, half)
    came_from, (state,) = "adapters half", ranks.run(saved_tensors, 1, files / "adapters half" / HALF)
    assert any("exp_avg_sq" in name for name in state)
    assert [name for name in state if "lora_" not in name and "optimizer" not in name] == []
    tp2 = ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--use-distributed-optimizer")
    layouts = {"TP2": (2, tp2), "PP2": (2, (*PP2, "--use-distributed-optimizer")), "EP1": EP1}
    for name, (world_size, layout) in layouts.items():
        run = f"adapters at {name}"
        ranks.run(save_again, world_size, argv(files, run, *layout, *adapters, "--load", files / came_from))
        (found,) = ranks.run(saved_tensors, 1, files / run / HALF)
        assert found.keys() == state.keys()
        assert [one for one in found if not torch.equal(found[one], state[one])] == []
        came_from = run
    resumed = argv(files, "adapters rest", *EP2[1], *adapters, "--load", files / came_from)
    assert ranks.run(train_and_hash, 2, resumed) == straight
