"""Run a Gemma 4 student with a Gemma 3 teacher: saved and exported at TP 2, converted, loaded elsewhere."""

from __future__ import annotations

import pytest
import torch

from mkd.plan.models.model_shape import ModelShape
from tests.checkpoint.saved_tensors import all_tensors
from tests.commands.test_convert import start
from tests.models.test_hf_parity import TOLERANCE, packed_logits, reference_logits
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import flags, run_main, write_records


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    add_tokenizer(make_model(folder / "student", "gemma4", seed=1))
    add_tokenizer(make_model(folder / "teacher", "gemma3", seed=2, hidden_size=64, head_dim=12))
    texts = [f"{i}: " + "the quick brown fox " * (i % 7 + 1) for i in range(60)]
    write_records(folder / "text.jsonl", *({"text": text} for text in texts))
    return folder


def test_a_run_saves_and_exports_what_transformers_reads(files, ranks):
    save, exported = files / "save", files / "exported"
    argv = flags(files, "run", "--save", save, "--export-hf", exported, "--tensor-model-parallel-size", 2)
    results = run_main(ranks, argv, world_size=2)
    assert [result.exit_code for result in results] == [0, 0], results[0].stderr
    trained, original = all_tensors(exported), all_tensors(files / "student")
    assert trained.keys() == original.keys()
    assert all(trained[name].isfinite().all() for name in trained)
    for name, tensor in trained.items():
        if name.endswith("layer_scalar"):  # it is not trained
            assert torch.equal(tensor, original[name]), name
    for part in ("post_feedforward_layernorm", "q_norm", "mlp.gate_proj"):
        assert any(part in name and not torch.equal(trained[name], original[name]) for name in trained)
    assert ModelShape.from_hf_dir(exported).differences(ModelShape.from_hf_dir(files / "student")) == []

    (logits,) = ranks.run(packed_logits, 1, exported, 1, False)
    expected = reference_logits(exported)
    assert (logits[:, : expected.shape[1]] - expected).abs().max() <= TOLERANCE * expected.abs().max()

    result = start("convert_mcore_to_hf.py", "--load", save, "--hf-out", files / "converted")
    assert result.returncode == 0, result.stderr
    converted = all_tensors(files / "converted")
    assert converted.keys() == trained.keys()
    assert all(torch.equal(converted[name], trained[name]) for name in trained)
