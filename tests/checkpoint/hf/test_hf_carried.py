"""Read and write models with gated delta nets bitwise, with tensors that an export copies."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mkd.checkpoint.hf.hf_carried import carried_bytes, find_carried, tell_of_skipped
from mkd.checkpoint.hf.hf_names import carried_names
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.checkpoint.hf.hf_shards import export_plan
from mkd.families.weight_rules import EMBEDDING, KEPT_IN_FP32, LM_HEAD
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import weight_bytes
from tests.checkpoint.hf.test_hf_experts import round_trip, tensors
from tests.tiny_models import make_model

CARRIED = {
    "mtp.fc.weight": torch.randn(48, 96),
    "mtp.layers.0.self_attn.q_norm.weight": torch.randn(16, dtype=torch.float16),
    "mtp.norm.weight": torch.full((48,), torch.nan).bfloat16(),  # values of what is copied do not matter
    "model.visual.patch_embed.weight": torch.randn(3, 5, 7, dtype=torch.float64),
    "model.visual.index": torch.arange(11),
}


def with_more(folder: Path, family: str, **sizes: object) -> Path:
    """Make a bf16 model whose folder has further tensors of several dtypes, in one file."""
    make_model(folder, family, dtype=torch.bfloat16, shard_size="5GB", **sizes)
    names = carried_names(ModelShape.from_hf_dir(folder), CARRIED)
    save_file(
        tensors(folder) | {name: CARRIED[name] for name in names},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return with_config(folder, mtp_num_hidden_layers=1)


def with_config(folder: Path, **more: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


def stored_bytes(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return dtype, shape and bytes of every tensor, as they are in the files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        data = content[8 + length :]
        for name, header in json.loads(content[8 : 8 + length]).items():
            if name != "__metadata__":
                first, last = header["data_offsets"]
                found[name] = header["dtype"], header["shape"], data[first:last]
    return found


@pytest.mark.parametrize(
    ("family", "size", "layout"),  # expert, pipeline and tensor parallel
    [
        ("qwen3_5", 2, (1, 2, 1)),
        ("qwen3_next", 2, (2, 1, 2)),
        pytest.param("qwen3_5_moe", 2, (2, 1, 1), marks=pytest.mark.slow),
        pytest.param("qwen3_next", 4, (2, 2, 2), marks=pytest.mark.slow),
        pytest.param("nemotron_h", 4, (1, 2, 2), marks=pytest.mark.slow),
    ],
)
def test_every_byte_comes_back(family, size, layout, tmp_path, ranks):
    source = with_more(tmp_path / "source", family)
    ranks.run(round_trip, size, source, tmp_path / "back", *layout)
    assert stored_bytes(tmp_path / "back") == stored_bytes(source)
    assert json.loads((tmp_path / "back/config.json").read_text())["mtp_num_hidden_layers"] == 1


@pytest.mark.parametrize(("family", "layout"), [("deepseek-experts", (1, 2, 1)), ("glm4_moe", (2, 1, 2))])
def test_layers_behind_the_decoder_come_back_with_the_trained_embedding(family, layout, tmp_path, ranks):
    """DeepSeek's and GLM's layers for further tokens: every byte, but their copies of embedding and head."""
    source, back = tmp_path / "source", tmp_path / "back"
    make_model(source, family, dtype=torch.bfloat16, shard_size="5GB")
    own, last, start = tensors(source), "model.layers.3.", "model.layers.4."
    own |= {name: tensor.float() for name, tensor in own.items() if name.endswith(KEPT_IN_FP32)}
    copies = {f"{start}embed_tokens.weight": EMBEDDING, f"{start}shared_head.head.weight": LM_HEAD}
    further = {name.replace(last, start): one.clone() for name, one in own.items() if name.startswith(last)}
    further |= {f"{start}eh_proj.weight": torch.randn(48, 96), f"{start}enorm.weight": torch.randn(48)}
    older = {name: torch.randn_like(own[original]) for name, original in copies.items()}
    save_file(own | further | older, source / "model.safetensors", metadata={"format": "pt"})
    with_config(source, num_nextn_predict_layers=1)
    ranks.run(round_trip, 2, source, back, *layout)
    before, after = stored_bytes(source), stored_bytes(back)
    assert after == before | {name: before[original] for name, original in copies.items()}
    assert after[f"{start}embed_tokens.weight"] != before[f"{start}embed_tokens.weight"]
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_copies_are_found_by_name_and_dtype(tmp_path):
    source = with_more(tmp_path, "qwen3_5")
    shape = ModelShape.from_hf_dir(source)
    found = find_carried(shape, source)
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in CARRIED.items()
    }
    plan = export_plan(shape, torch.float32, carried=found)
    assert plan.total_bytes == export_plan(shape, torch.float32).total_bytes + sum(
        tensor.nbytes for tensor in CARRIED.values()
    )
    assert plan.total_bytes == weight_bytes(shape, bf16=False) + carried_bytes(shape, source)


def test_a_folder_without_weights_has_nothing_to_copy(tmp_path, caplog):
    """The export then says 0 layers that predict further tokens."""
    with_config(make_model(tmp_path, "qwen3_5"), mtp_num_hidden_layers=1)
    shape = ModelShape.from_hf_dir(tmp_path)
    for path in tmp_path.glob("model*"):
        path.unlink()
    with caplog.at_level(logging.WARNING, "mkd"):
        assert find_carried(shape, tmp_path) == {}
    assert "no layers that predict further tokens" in caplog.text and "--reference-hf" in caplog.text


def test_a_folder_without_weights_may_lack_what_its_config_does_not_name(tmp_path, caplog):
    """Qwen3-Next is released with `mtp.*`, and its config.json says nothing of it."""
    make_model(tmp_path, "qwen3_next")
    for path in tmp_path.glob("model*"):
        path.unlink()
    with caplog.at_level(logging.WARNING, "mkd"):
        assert find_carried(ModelShape.from_hf_dir(tmp_path), tmp_path) == {}
    assert "the export has no mtp.*" in caplog.text and "--reference-hf" in caplog.text


def test_what_is_not_trained_is_said(tmp_path, caplog):
    source = with_more(tmp_path, "qwen3_5")
    with caplog.at_level(logging.WARNING, "mkd"):
        tell_of_skipped(ModelShape.from_hf_dir(source), HFCheckpoint(source))
    assert "5 tensors (mtp.*, model.visual.*) are not trained" in caplog.text
