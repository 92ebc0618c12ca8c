"""Compare the planned memory of mixers with what autograd keeps."""

from __future__ import annotations

import pytest
import torch

from mkd.families.mixer_shape import DeltaShape, MambaShape
from mkd.plan.footprint.activations import Activations
from mkd.plan.footprint.mixer_bytes import mixer_bytes
from mkd.plan.parallel_sizes import ONE_PROCESS
from tests.plan.shapes import QWEN3_5_9B, SEQ_LENGTH, config

TOKENS = 640
SIZES = dict(key_dim=16, value_dim=32, kernel_size=4)
MIXERS = (
    DeltaShape(key_heads=4, value_heads=8, **SIZES),
    MambaShape(groups=4, num_heads=8, least_step=0.001, **SIZES),
)


def kept_by_a_token(mixer: DeltaShape | MambaShape, element: int) -> float:
    """Return the bytes a token that backward needs between the projections, weights excluded."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    from mkd.models.mixers.delta_net import DeltaNet
    from mkd.models.mixers.mamba import Mamba
    from mkd.models.mixers.mixer import MixerParts
    from mkd.models.mixers.pack_rows import pack_rows
    from mkd.models.packed import packed_documents
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect
    from tests.plan.kept_tensors import KeptTensors

    context = ParallelContext.create(detect())
    dtype = {2: torch.bfloat16, 4: torch.float32}[element]
    options = dict(params_dtype=dtype, gradient_accumulation_fusion=False)
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, **options)
    linears = MixerParts(ColumnParallelLinear, RowParallelLinear)
    module = DeltaNet if isinstance(mixer, DeltaShape) else Mamba
    net = module(config, linears, 1, mixer=mixer, pg_collection=context.groups)
    borders = torch.tensor([0, TOKENS // 3, TOKENS]).int()
    rows = pack_rows(packed_documents(borders, borders, TOKENS), TOKENS, 1, context.device)
    projected = torch.randn(TOKENS, mixer.projected_width, dtype=dtype, requires_grad=True)
    with KeptTensors([*net.parameters(), rows.documents, rows.positions]) as kept:
        output = net._mix(projected, rows)
        of_token = kept.live / TOKENS
    output.sum().backward()
    return of_token


def test_recomputation_keeps_the_first_product():
    """Count the bytes of a Qwen3.5-9B layer in bf16; both ways keep the input of the last product."""
    mixer = QWEN3_5_9B.layers[0].mixer
    flags = ("--recompute-granularity", "selective", "--recompute-modules", "mixer")
    kept, again = (Activations(config(*more), QWEN3_5_9B, 2, SEQ_LENGTH, ONE_PROCESS) for more in ((), flags))
    of_layers = [one.layer_bytes(QWEN3_5_9B.layers[0]) for one in (kept, again)]
    assert of_layers[0] - of_layers[1] == SEQ_LENGTH * (mixer_bytes(mixer, 2) - 2 * mixer.projected_width)
    assert kept.layer_bytes(QWEN3_5_9B.layers[3]) == again.layer_bytes(QWEN3_5_9B.layers[3])
    assert again.backward_bytes() > kept.backward_bytes()


@pytest.mark.parametrize("element", [2, 4])
@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer.title)
def test_a_token_keeps_what_the_plan_says(mixer, element, ranks):
    (measured,) = ranks.run(kept_by_a_token, 1, mixer, element)
    assert mixer_bytes(mixer, element) == pytest.approx(measured, rel=0.05)
