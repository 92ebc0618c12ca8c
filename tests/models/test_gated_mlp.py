"""Check `GatedMLP` against Megatron's MLP in a model, and Transformer Engine's kernels against torch."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.models.test_hf_parity import gradients
from tests.tiny_models import make_model


def torch_kernels(activation):
    """Return kernels that compute what Transformer Engine's do."""

    def forward(gate_up, quantizer):
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    def backward(gradient, gate_up, quantizer):
        with torch.enable_grad():
            leaf = gate_up.detach().requires_grad_()
            return torch.autograd.grad(forward(leaf, quantizer), leaf, gradient)[0]

    return forward, backward


def gated_gradients(folder):
    """Return what `gradients` does, of a model whose layers have `GatedMLP`."""
    from mkd.models import layer_parts, specs

    parts = replace(specs.LOCAL, mlp=layer_parts.GatedMLP)
    with mock.patch.object(specs, "LOCAL", parts), mock.patch.object(layer_parts, "_kernels", torch_kernels):
        return gradients(folder)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_has_the_same_gradients(family, tmp_path, ranks):
    folder = make_model(tmp_path / family, family)
    (expected,), (found,) = ranks.run(gradients, 1, folder), ranks.run(gated_gradients, 1, folder)
    assert found.keys() == expected.keys()
    for tensor, pieces in expected.items():
        for (_, reference), (_, gradient) in zip(pieces, found[tensor], strict=True):
            assert (gradient - reference).abs().max() <= 1e-5 * reference.abs().max(), tensor


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [F.silu, F.gelu], ids=["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_kernels_equal_torch(activation, dtype, tolerance):
    """GELU has the tanh form under the name that Megatron gives it."""
    from mkd.models.layer_parts import _Gate, _kernels

    options = {"approximate": "tanh"} if activation is F.gelu else {}
    generator = torch.Generator("cuda").manual_seed(0)
    gate_up, gradient = (
        torch.randn(96, 1, width, device="cuda", generator=generator).to(dtype) for width in (512, 256)
    )
    exact = gate_up.double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    expected = activation(gate, **options) * up
    expected.backward(gradient.double())
    own = gate_up.clone().requires_grad_()
    result = _Gate.apply(own, *_kernels(activation))
    result.backward(gradient)
    for ours, reference in ((result, expected), (own.grad, exact.grad)):
        assert ours.dtype == dtype
        assert (ours.double() - reference).abs().max() <= tolerance * reference.abs().max()
