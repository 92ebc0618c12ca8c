"""Check which shape a target gives, and that a written student has the counted parameters."""

from __future__ import annotations

import re

import pytest

from mkd.errors import UsageError
from mkd.plan.models.model_shape import ModelShape
from mkd.pruning.cut import Cut, evenly_spaced, without_block, without_middle
from mkd.pruning.sizes import Sizes, StudentSizes, num_parameters
from tests.reported import Reported

SMOLLM2 = dict(
    model_type="llama",
    num_hidden_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
)
TEACHER = ModelShape.from_hf_config(SMOLLM2)
LAYER = 3_540_096  # 2 norms, 9 + 3 + 3 + 9 heads of 64 by 576, 3 x 1536 by 576


def test_parameters_of_the_teacher():
    assert num_parameters(TEACHER) == 134_515_008


@pytest.mark.parametrize("target, layers", [(134_515_008, 30), (134_515_007, 29), (100_000_000, 20)])
def test_a_target_is_met_by_the_most_layers_that_fit(target, layers):
    sizes = Sizes(target_params=target).resolve(TEACHER)[0]
    assert sizes.num_layers == layers and sizes.ffn_hidden_size == 1536
    assert num_parameters(sizes.shape(TEACHER)) == 134_515_008 - (30 - layers) * LAYER <= target


def test_with_layers_given_a_target_cuts_ffn_channels():
    (sizes,) = Sizes(num_layers=24, target_params=100_000_000).resolve(TEACHER)
    assert sizes.num_layers == 24 and sizes.ffn_hidden_size == 1152
    wider = StudentSizes(24, 1152 + 64, 3, 576)
    assert num_parameters(sizes.shape(TEACHER)) <= 100_000_000 < num_parameters(wider.shape(TEACHER))


def test_a_target_is_met_by_layers_by_channels_or_by_both():
    found = Sizes(target_params=100_000_000).resolve(TEACHER)
    assert [(one.num_layers, one.ffn_hidden_size) for one in found] == [(20, 1536), (30, 832), (25, 1088)]
    assert all(num_parameters(one.shape(TEACHER)) <= 100_000_000 for one in found)
    (only_layers,) = Sizes(ffn_hidden_size=1024, target_params=100_000_000).resolve(TEACHER)
    assert only_layers.ffn_hidden_size == 1024 and only_layers.num_layers == 26
    (met,) = Sizes(num_layers=8, target_params=100_000_000).resolve(TEACHER)
    assert met == StudentSizes(8, 1536, 3, 576)


@pytest.mark.parametrize(
    "given", [{}, {"num_layers": 24}, {"ffn_hidden_size": 1024}, {"ffn_hidden_size": 40}, {"hidden_size": 96}]
)
def test_a_target_out_of_reach_names_the_smallest_one_that_is_not(given):
    with pytest.raises(UsageError) as caught:
        Sizes(**given, target_params=1_000_000).resolve(TEACHER)
    assert Reported.of(caught.value) == "out-of-range: cannot be met by fewer layers or"
    least = int(re.search(r"at least ([\d,]+)", caught.value.do)[1].replace(",", ""))
    assert min(
        num_parameters(one.shape(TEACHER)) for one in Sizes(**given, target_params=least).resolve(TEACHER)
    )
    with pytest.raises(UsageError):
        Sizes(**given, target_params=least - 1).resolve(TEACHER)


def test_given_sizes_that_miss_their_target():
    with pytest.raises(UsageError) as caught:
        Sizes(num_layers=24, ffn_hidden_size=1536, target_params=50_000_000).resolve(TEACHER)
    assert Reported.of(caught.value) == "out-of-range: cannot be met by fewer layers or"


def test_a_target_beyond_the_teacher():
    with pytest.raises(UsageError) as caught:
        Sizes(target_params=200_000_000).resolve(TEACHER)
    assert Reported.of(caught.value) == "out-of-range: is more than the teacher's"


def test_layers_by_position():
    assert evenly_spaced(30, 8) == (0, 4, 8, 12, 17, 21, 25, 29)
    assert evenly_spaced(30, 1) == (0,)
    assert without_block(6, 2, 3) == (0, 1, 5)
    assert without_middle(30, 24) == (*range(12), *range(18, 30))
    assert without_middle(4, 4) == (0, 1, 2, 3)


def test_kinds_that_follow_from_the_index_are_written_down():
    """Without a list of kinds, Qwen has windows from max_window_layers on: a cut would move that border."""
    config = SMOLLM2 | dict(
        model_type="qwen2", use_sliding_window=True, max_window_layers=20, sliding_window=64
    )
    teacher = ModelShape.from_hf_config(config)
    written = Cut(without_block(30, 10, 6)).config(teacher)
    assert written["layer_types"] == ["full_attention"] * 14 + ["sliding_attention"] * 10
    assert [bool(one.sliding_window) for one in ModelShape.from_hf_config(written).layers] == (
        [False] * 14 + [True] * 10
    )
