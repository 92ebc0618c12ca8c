"""Compare fused kernels of gated delta nets with the scan in float64, and whether they repeat their bits."""

from __future__ import annotations

import pytest
import torch

from tools.benchmarks.mixer_case import EPSILON, OPERATIONS, MixerCase, errors, same_bits

pytestmark = pytest.mark.gpu
MANY = (700, 1, 2, 130, 64, 1100, 3, 40)
CASES = {
    "many documents": MixerCase(MANY),
    "one document": MixerCase((1000,)),
    "padding": MixerCase(MANY, padding=77),
    "one value head for each key head": MixerCase(MANY, heads=2),
    "64 channels": MixerCase(MANY, key_dim=64, value_dim=64),
    "256 channels": MixerCase(MANY, key_dim=256, value_dim=256),
    "unlike channels": MixerCase(MANY, key_dim=64, value_dim=128),
}
ALLOWED = 0.02  # relative error; inputs have 8 bits of a fraction, and so have results


def machine() -> tuple[torch.device, torch.dtype]:
    pytest.importorskip("fla.ops")
    return torch.device("cuda"), torch.bfloat16


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(case, operation):
    from mkd.models.mixers.fused_recurrence import FusedRecurrence

    where = machine()
    (found,) = errors(case, [FusedRecurrence()], operation, *where)
    assert max(found.values()) < ALLOWED, found


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_process_repeats_its_bits(operation):
    from mkd.models.mixers.fused_recurrence import FusedRecurrence

    assert same_bits(CASES["padding"], FusedRecurrence(), operation, *machine())


def test_states_behind_prompts():
    """The padding behind a prompt does not reach its state."""
    from mkd.models.mixers.fused_recurrence import FusedRecurrence
    from mkd.models.mixers.recurrence import PackedRecurrence

    device, dtype = machine()
    case = MixerCase((100, 64, 3, 200), padding=30)
    spans = [(0, 90), (100, 164), (164, 165), (167, 367)]
    rows, inputs = case.rows(device), case.inputs(device, dtype, seed=3)
    given = [inputs[name] for name in OPERATIONS["delta rule"][1]]
    _, exact = PackedRecurrence().delta_rule_with_states(*(one.double() for one in given), rows, spans)
    outputs, states = FusedRecurrence().delta_rule_with_states(*given, rows, spans)
    assert states.dtype == torch.float32 and outputs.dtype == dtype
    for ours, theirs in zip(states, exact, strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < ALLOWED


def test_the_host_waits_for_the_device_nowhere():
    """Pass a pack whose documents only the device knows. The first pass tunes kernels, which does wait."""
    from mkd.models.mixers.fused_recurrence import FusedRecurrence
    from mkd.models.mixers.pack_rows import pack_rows

    device, dtype = machine()
    case, fused = CASES["padding"], FusedRecurrence()
    inputs = case.inputs(device, dtype, seed=3)
    given = {name: inputs[name].requires_grad_() for name in OPERATIONS["delta rule"][1]}
    try:
        for mode in ("default", "error"):
            packed = case.packed(device)
            torch.cuda.set_sync_debug_mode(mode)
            rows = pack_rows(packed, case.tokens, 1, device)
            fused.convolve(inputs["x"], inputs["filters"], None, rows)
            outputs = fused.delta_rule(*given.values(), rows)
            fused.gated_norm(outputs, inputs["gate"], inputs["weight"], EPSILON).sum().backward()
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
