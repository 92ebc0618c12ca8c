"""Check how configurations of Nemotron-H read, and what mkd refuses for it."""

from __future__ import annotations

import pytest

from mkd.checkpoint.hf.hf_check import check_hf_checkpoint
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.errors import CheckpointError, UsageError
from mkd.families.mixer_shape import MambaShape
from mkd.plan.checks.parallel import check_heads
from mkd.plan.footprint.activations import Activations
from mkd.plan.models.flops import layer_matmul_parameters, layer_mixing_flops
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import active_parameters, model_parameters
from mkd.plan.parallel_sizes import ONE_PROCESS
from mkd.pruning.request import refuse_other_kinds
from tests.plan.shapes import SEQ_LENGTH, STUDENT, config
from tests.reported import refused
from tests.run_facts import facts_of
from tests.tiny_models import config_of, make_model

SIZES = dict(model_type="nemotron_h", vocab_size=131072, hidden_size=4096, num_attention_heads=32)
NANO = SIZES | dict(  # Nemotron 3 Nano
    hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    hidden_size=2688,
    num_key_value_heads=2,
    mamba_num_heads=64,
    n_routed_experts=128,
    num_experts_per_tok=6,
    moe_intermediate_size=1856,
    moe_shared_expert_intermediate_size=3712,
    routed_scaling_factor=2.5,
)


UNNORMALISED = "model-feature-not-supported: norm_topk_prob"


def read(**more: object) -> ModelShape:
    return ModelShape.from_hf_config(config_of("nemotron_h") | more)


def kinds(shape: ModelShape) -> str:
    letters = (
        "M" if one.mixer else "*" if one.has_attention else "-" if one.is_dense else "E"
        for one in shape.layers
    )
    return "".join(letters)


def test_a_configuration_with_sizes_alone_is_that_of_transformers():
    from transformers import NemotronHConfig

    ours, theirs = ModelShape.from_hf_config(SIZES | {"hybrid_override_pattern": "M-*"}), NemotronHConfig()
    assert ours.layers[0].mixer == MambaShape(
        groups=theirs.n_groups,
        num_heads=theirs.mamba_num_heads,
        key_dim=theirs.ssm_state_size,
        value_dim=theirs.mamba_head_dim,
        kernel_size=theirs.conv_kernel,
        least_step=theirs.time_step_min,
    )
    assert ours.layers[1].ffn_hidden_size == theirs.intermediate_size and not ours.layers[1].is_gated
    assert (ours.head_dim, ours.num_query_groups) == (theirs.head_dim, theirs.num_key_value_heads)
    assert ours.norm_epsilon == theirs.layer_norm_epsilon and ours.ropes == ()
    assert ours.max_position_embeddings == theirs.max_position_embeddings


def test_kinds_of_layers_are_words_or_letters():
    """`num_hidden_layers` of a release does not count."""
    named = {"layers_block_type": None, "num_hidden_layers": 9}
    assert kinds(read()) == "M-*M"
    assert kinds(read(**named, hybrid_override_pattern="MM-*-M")) == "MM-*-M"
    assert kinds(read(**named, layer_types=["mamba", "attention", "mlp"])) == "M*-"
    assert kinds(read(**named)) == "ME*-"  # as in transformers
    former = read(mamba_n_groups=2, mamba_d_conv=3, mamba_dt_min=0.5).layers[0].mixer
    assert (former.groups, former.kernel_size, former.least_step) == (2, 3, 0.5)


def test_the_sizes_of_releases():
    """Nemotron-H-8B-Base has 8.1 billion parameters by its card, Nemotron 3 Nano 31.6 with 3.6 active."""
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    shape = ModelShape.from_hf_config(SIZES | {"hybrid_override_pattern": pattern})
    assert shape.num_layers == 52
    assert model_parameters(shape).total / 1e9 == pytest.approx(8.1, abs=0.05)
    shape = ModelShape.from_hf_config(NANO)
    assert (shape.num_layers, shape.num_experts, shape.moe.top_k) == (52, 128, 6)
    assert model_parameters(shape).total / 1e9 == pytest.approx(31.6, abs=0.05)
    assert active_parameters(shape) / 1e9 == pytest.approx(3.6, abs=0.05)


@pytest.mark.parametrize(
    ("more", "code", "error"),
    [
        ({"mlp_hidden_act": "silu"}, "model-feature-not-supported: mlp_hidden_act 'silu'", UsageError),
        ({"use_bias": True}, "model-feature-not-supported: use_bias True", UsageError),
        ({"mamba_conv_bias": False}, "model-feature-not-supported: use_conv_bias False", UsageError),
        ({"tie_word_embeddings": True}, "model-feature-not-supported: tie_word_embeddings", UsageError),
        ({"layers_block_type": ["conv"]}, "model-feature-not-supported: layer type 'conv'", UsageError),
        ({"layers_block_type": ["moe"], "norm_topk_prob": False}, UNNORMALISED, UsageError),
        ({"n_groups": 3}, "model-config-not-valid: mamba_num_heads 8", CheckpointError),
        ({"ssm_state_size": 0}, "model-config-not-valid", CheckpointError),
    ],
)
def test_what_cannot_run_exactly_is_refused(more, code, error):
    with refused(code, error):
        read(**more)


def test_differences_name_the_kinds_of_layers():
    found = read().differences(read(layers_block_type=["linear_attention", "mlp", "mlp", "linear_attention"]))
    assert "layer 2: mixes_tokens True instead of False" in found


def test_limits_are_found_before_the_run():
    shape = ModelShape.from_hf_config(SIZES | {"hybrid_override_pattern": "M-*"})
    sizes = "--tensor-model-parallel-size", 8, "--context-parallel-size", 2
    (groups,) = check_heads(facts_of(config(*sizes), 16, shape, (STUDENT,)))
    assert groups.what.startswith("the student's 8 groups of a Mamba-2 mixer are not divisible by")
    with refused("cut-not-supported: mkd cannot cut a nemotron_h model", UsageError):
        refuse_other_kinds(shape)


def test_a_layer_with_experts_of_latents_by_hand():
    """Bytes a token of a layer: h 2688, latents 512, 6 of 128 experts of width 1856, a shared one of 3712.

    The norm keeps input and output. Each row keeps the experts' input, input and output of the MLP, its
    weight and its places; a token keeps the sum of its rows, and 13 bytes for every expert.
    """
    shape = ModelShape.from_hf_config(NANO | {"moe_latent_size": 512})
    layer = shape.layers[1]
    plan = Activations(config(), shape, 2, SEQ_LENGTH, ONE_PROCESS)
    rows = 6 * (2 * (512 + 2 * 1856) + 12) + 2 * 512 + 13 * 128
    assert plan.layer_bytes(layer) == SEQ_LENGTH * (2 * 2 * 2688 + 4 + rows + 2 * 2 * 3712)
    matrices = 6 * 2 * 512 * 1856 + 2 * 2688 * 3712 + 2 * 512 * 2688 + 128 * 2688
    assert layer_matmul_parameters(shape, layer) == matrices
    assert layer_matmul_parameters(shape, shape.layers[0]) == 2688 * (2 * 4096 + 2 * 1024 + 64 + 4096)


def test_the_recurrence_by_hand():
    """64 heads of 64 channels in 8 groups, states of 64 x 128: FLOPs of a token between the projections.

    Two products with the state, scores of a group and their products with values in chunks of 64, and a
    convolution of 6,144 channels over 4 tokens.
    """
    shape = ModelShape.from_hf_config(NANO)
    flops = 64 * (2 * 2 * 64 * 128 + 64 * 2 * 64) + 8 * 64 * 2 * 128 + 2 * 4 * 6144
    assert layer_mixing_flops(shape, shape.layers[0], 10, 100) == 10 * flops
    assert layer_mixing_flops(shape, shape.layers[1], 10, 100) == 0


def test_names_of_a_model_saved_without_its_head(tmp_path):
    from transformers import AutoModel

    folder = make_model(tmp_path / "model", "nemotron_h")
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "body")
    with refused("hf-tensor-prefix", CheckpointError) as caught:
        check_hf_checkpoint(ModelShape.from_hf_dir(folder), HFCheckpoint(tmp_path / "body"))
    assert "lack the prefix 'backbone.'" in str(caught.value)
