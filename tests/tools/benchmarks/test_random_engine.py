"""Check the engine on random weights: known shapes, and weights that do not depend on the drawing process."""

from __future__ import annotations

import pytest
import torch

from mkd.config.load import load_config
from mkd.errors import UsageError
from mkd.plan.models.parameters import model_parameters
from tools.benchmarks.random_engine import PairSettings, RandomCheckpoint
from tools.benchmarks.shapes import SHAPES, shape_of

PUBLISHED = [
    ("smollm2-135m", 0.13), ("qwen3-1.7b", 1.72), ("qwen3-6b", 5.99), ("qwen3-8b", 8.19),
    ("llama3.2-1b", 1.24), ("llama3.1-8b", 8.03), ("qwen3-30b-a3b", 30.53),
    ("qwen3-235b-a22b", 235.09)]  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), PUBLISHED)
def test_shapes_have_their_published_number_of_parameters(name, billions):
    shape = shape_of(name)
    assert model_parameters(shape).total / 1e9 == pytest.approx(billions, abs=0.01)


def test_every_shape_is_a_model_and_an_unknown_one_is_not():
    assert all(shape_of(name).vocab_size > 0 for name in SHAPES)
    assert shape_of("qwen3-8b:5").num_layers == 5
    for name in ("gpt", "qwen3-8b:x"):
        with pytest.raises(UsageError, match="choose one of: tiny-student"):
            shape_of(name)


def test_random_weights_repeat_and_slices_differ():
    one, other = (RandomCheckpoint(shape_of("tiny-student"), torch.device("cpu")) for _ in range(2))
    name, rows = "model.embed_tokens.weight", (slice(8, 24), slice(None))
    assert torch.equal(one.read(name, rows), other.read(name, rows))
    assert not torch.equal(one.read(name, rows), one.read(name, (slice(24, 40), slice(None))))
    seeded = RandomCheckpoint(shape_of("tiny-student"), torch.device("cpu"), seed=1)
    assert not torch.equal(one.read(name, rows), seeded.read(name, rows))
    assert one.read(name, (slice(None), slice(4))).shape == (500, 4)
    assert one.read("model.norm.weight", (slice(32),)).eq(1).all()


def test_settings_become_flags_of_the_training_command():
    settings = PairSettings(
        "a", "b", 128, num_microbatches=3, tensor_parallel=2, flags=("--clip-grad", "0.5")
    )
    config = load_config(settings.argv(torch.bfloat16, data_parallel=2)).config
    assert (
        config.training.bf16 and config.training.global_batch_size == 6 and config.parallel.sequence_parallel
    )
    assert config.optimizer.lr == 0 and config.optimizer.clip_grad == 0.5
