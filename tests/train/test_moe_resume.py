"""Check stop, resume and export with experts: bitwise at one layout, the same weights at others."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_models import add_tokenizer, make_model
from tests.train.test_resume import STEPS, argv, train_and_hash

EP2, EP4 = (("--use-distributed-optimizer", "--expert-model-parallel-size", size) for size in (2, 4))
PP2 = ("--pipeline-model-parallel-size", 2)
BALANCE = ("--moe-aux-loss-coeff", 0.01)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make a Qwen3-MoE student whose first layer is dense, a Mixtral teacher, and a text."""
    folder = tmp_path_factory.mktemp("moe_resume")
    sizes = dict(vocab_size=300, num_hidden_layers=2)
    add_tokenizer(make_model(folder / "student", "qwen3_moe", seed=1, **sizes | {"mlp_only_layers": [0]}))
    add_tokenizer(make_model(folder / "teacher", "mixtral", seed=2, **sizes))
    lines = (f'{{"text": "document {i}: {"the quick brown fox " * (i % 7 + 1)}"}}\n' for i in range(60))
    (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.fault(1)
def test_resume_is_bitwise_and_other_layouts_load_it(files, ranks):
    straight = ranks.run(train_and_hash, 2, argv(files, "whole", *EP2, *BALANCE), files / "whole hf")
    half = argv(files, "half", *EP2, *BALANCE, "--exit-interval", STEPS // 2)
    ranks.run(train_and_hash, 2, half, files / "half hf")
    resumed = ranks.run(train_and_hash, 2, argv(files, "half", *EP2, *BALANCE, "--load", files / "half"))
    assert resumed == straight
    saved = weights(files / "half hf")
    for name, world, layout in (("EP1", 1, EP2[:1]), ("EP4", 4, EP4)):
        more = (*layout, *BALANCE, "--load", files / "half", "--ckpt-step", STEPS // 2)
        stop = argv(files, f"{name} stop", *more, "--train-iters", STEPS // 2)
        ranks.run(train_and_hash, world, stop, files / f"{name} stop hf")
        loaded = weights(files / f"{name} stop hf")
        assert saved.keys() == loaded.keys() and all(torch.equal(saved[n], loaded[n]) for n in saved)
        ranks.run(train_and_hash, world, argv(files, name, *more), files / f"{name} hf")
        expected = weights(files / "whole hf")
        for tensor, found in weights(files / f"{name} hf").items():
            assert (found - expected[tensor]).norm() <= 1e-4 * expected[tensor].norm(), (name, tensor)


@pytest.mark.slow
def test_a_stage_without_experts_resumes(files, ranks):
    """The first stage, which saves the number of steps, has the dense layer alone."""
    straight = ranks.run(train_and_hash, 2, argv(files, "stages whole", *PP2))
    ranks.run(train_and_hash, 2, argv(files, "stages", *PP2, "--exit-interval", STEPS // 2))
    assert ranks.run(train_and_hash, 2, argv(files, "stages", *PP2, "--load", files / "stages")) == straight
