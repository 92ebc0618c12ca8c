"""Compare families with transformers: logits, gradients at several layouts, bytes of an export."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import model_parameters
from tests.checkpoint.hf.test_hf_experts import BIAS, round_trip, tensors
from tests.models.exact64 import in_float64
from tests.models.test_hf_parity import documents, gradients, packed_logits, reference_logits, weighted_sum
from tests.tiny_families import FURTHER, RENAMED
from tests.tiny_models import make_model
from tests.train.hf_gradients import load, reference_gradients
from tests.train.invariance import SP, TOLERANCE, Layout, add_text
from tests.train.moe_invariance import EP2
from tests.train.test_moe_gradients import gradients as gradients_of_step

# Ends of the names of tensors that no gradient changes.
UNTRAINED = BIAS, ".layer_scalar", ".act_fn.beta", ".act_fn.eps"
NOISE = 1.5  # of transformers' own error in fp32
# Models for the layouts of daily tests: their layers have parts that tensor, or context parallelism cuts.
BY_HEADS, BY_TOKENS = (
    ("glm4_moe", "olmo3", "hunyuan_v1_dense", "minimax_m2", "gemma4", "apertus"),
    ("smollm3", "ministral3", "granite", "gemma4-experts"),
)
NIGHTLY = (
    "gemma4-values",
    "glm4_moe-air",
    "kimi_k2",
    "granitemoehybrid-nope",
    "olmo3-padded",
    "exaone4-full",
    "nemotron_h",
    "nemotron_h-nano",
)
ODD_GROUPS = ("gemma4",)  # windows, and 3 groups: context parallelism cannot trade tokens for heads
LAYOUTS = (Layout("TP2 SP", 2, tp=2, flags=SP), Layout("PP2 VPP2 CP2", 4, pp=2, vp=2, cp=2))


@dataclass(frozen=True)
class Model:
    """A tiny model as mkd and as transformers reads it."""

    name: str
    ours: Path
    theirs: Path
    has_experts: bool


def make(folder: Path, name: str, seed: int = 0) -> Model:
    theirs = ours = add_text(make_model(folder / "theirs", name, seed))
    if name in RENAMED:
        ours = shutil.copytree(theirs, folder / "ours")
        config = json.loads((ours / "config.json").read_text())
        assert config["model_type"] == RENAMED[name]
        (ours / "config.json").write_text(json.dumps(config | {"model_type": name}))
    return Model(name, ours, theirs, ModelShape.from_hf_dir(ours).moe is not None)


def marked(name: str, is_slow: bool = False, *others):
    """Return a parameter that only the nightly tests have if `is_slow`, or if the model is a variant."""
    return pytest.param(name, *others, marks=[pytest.mark.slow] if is_slow or name in NIGHTLY else [])


@pytest.fixture(scope="module", params=[marked(name) for name in FURTHER])
def model(request, tmp_path_factory):
    return make(tmp_path_factory.mktemp("families"), request.param)


def test_logits_equal_transformers(model, ranks):
    expected = reference_logits(model.theirs)
    for tp, sequence_parallel in ((1, False), (2, True)):
        shards = ranks.run(packed_logits, tp, model.ours, tp, sequence_parallel)
        logits = torch.cat(shards, dim=1)[:, : expected.shape[1]]
        error = (logits - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE, f"TP {tp}: relative error {error:.2e}"


def backward(model, folder):
    """Return the gradients of `weighted_sum` of the logits, by their names in a checkpoint."""
    logits = [model(ids[None]).logits[0] for ids in documents(model.config.vocab_size)]
    weighted_sum(torch.cat(logits)).backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(folder)
    return gradients_in(folder)


def gradients_in(folder):
    """Return the tensors of a folder that have a gradient."""
    return {name: one for name, one in tensors(folder).items() if not name.endswith(UNTRAINED)}


def errors(found, exact):
    """Return the relative error (2-norm) of all tensors of a kind, by name without its numbers."""
    squares = {}
    for name, expected in exact.items():
        sums = squares.setdefault(re.sub(r"\d+", "*", name), [0.0, 0.0])
        sums[0] += float((found[name] - expected).square().sum())
        sums[1] += float(expected.square().sum())
    return {kind: (difference / (whole or 1.0)) ** 0.5 for kind, (difference, whole) in squares.items()}


def test_gradients_are_as_exact_as_those_of_transformers(model, ranks, tmp_path):
    from transformers import AutoModelForCausalLM

    with in_float64(load(model.theirs)) as in_fp64:
        exact = backward(in_fp64, tmp_path / "64")
    noise: dict[str, float] = {}  # of the worse of two attentions
    for attention in ("eager", "sdpa"):
        in_fp32 = AutoModelForCausalLM.from_pretrained(
            model.theirs, dtype=torch.float32, attn_implementation=attention
        )
        for kind, error in errors(backward(in_fp32, tmp_path / attention), exact).items():
            noise[kind] = max(error, noise.get(kind, 0.0))
    (pieces,) = ranks.run(gradients, 1, model.ours)
    found = {name: torch.zeros_like(one) for name, one in exact.items()}
    assert found.keys() == pieces.keys()
    for name, of_tensor in pieces.items():
        for piece, gradient in of_tensor:
            piece.in_tensor(found[name]).copy_(gradient)
    worst = max((error / noise[kind], kind) for kind, error in errors(found, exact).items())
    assert worst[0] <= NOISE, f"{worst[1]}: {worst[0]:.2f} times the error of transformers"


def test_an_export_has_the_bytes_of_its_source(model, ranks, tmp_path):
    """Every tensor of the checkpoint is a parameter, counted by the plan, and comes back bit by bit."""
    expected = tensors(model.ours)
    counted = model_parameters(ModelShape.from_hf_dir(model.ours)).total
    assert counted == sum(one.numel() for name, one in expected.items() if not name.endswith(UNTRAINED))
    ranks.run(round_trip, 4, model.ours, tmp_path / "out", 2 if model.has_experts else 1, 2, 2)
    found = tensors(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor if name.endswith(BIAS) else tensor.bfloat16()), name


@pytest.fixture(scope="module")
def step(model, tmp_path_factory):
    """Return a teacher of the same family, and transformers' gradients and loss of a step in float64."""
    folder = tmp_path_factory.mktemp("step")
    teacher = make(folder / "teacher", model.name, seed=1)
    loss = reference_gradients(model.theirs, teacher.theirs, folder / "reference")
    return teacher, folder / "reference", loss


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        marked(name, name not in tested, layout)
        for layout, tested in zip(LAYOUTS, (BY_HEADS, BY_TOKENS), strict=True)
        for name in FURTHER
        if not (layout.cp > 1 and name in ODD_GROUPS)
    ],
    indirect=["model"],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_step_has_the_gradients_of_transformers(layout, model, step, ranks, tmp_path):
    """The real engine trains on packs of documents; transformers sees one document at a time."""
    teacher, reference, loss = step
    if model.has_experts:
        layout = layout.with_flags(EP2)
    found = ranks.run(gradients_of_step, layout.ranks, layout, model.ours, teacher.ours, tmp_path)
    assert found[0]["loss"] / found[0]["num_loss_tokens"] == pytest.approx(loss, rel=TOLERANCE)
    exact, found = gradients_in(reference), gradients_in(tmp_path / "gradients")
    assert found.keys() == exact.keys()
    error, where = max((error, kind) for kind, error in errors(found, exact).items())
    assert error <= TOLERANCE, f"{where}: {error:.2e}"
