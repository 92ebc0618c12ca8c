"""Export LoRA checkpoints, and refuse adapters where a model is wanted."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.saved_tensors import all_tensors
from tests.reported import reported_codes
from tests.train.command import flags, make_files, run_main

LORA = "--lora-rank", "4", "--export-lora"


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """Train a student with adapters, export it both ways and save it."""
    files = make_files(tmp_path_factory.mktemp("lora"))
    more = *LORA, str(files / "adapter"), "--export-hf", str(files / "merged")
    (result,) = run_main(ranks, flags(files, "run", *more, save="saved"))
    assert result.exit_code == 0, result.stderr
    return files


def export(ranks, files, *more, world_size=1):
    argv = ["--load", files / "saved", "--hf-out", files / "later", "--overwrite", *more]
    return run_main(ranks, list(map(str, argv)), world_size, "mkd.commands.export")


def test_a_checkpoint_exports_what_the_run_has_exported(trained, ranks):
    both = "--reference-hf", trained / "student", "--lora-out", trained / "later adapter"
    for world_size, layout in ((1, ()), (2, ("--tensor-model-parallel-size", 2))):
        results = export(ranks, trained, *both, *layout, world_size=world_size)
        assert [result.exit_code for result in results] == [0] * world_size, results[0].stderr
        for ours, theirs in (("later", "merged"), ("later adapter", "adapter")):
            expected, found = all_tensors(trained / theirs), all_tensors(trained / ours)
            assert expected.keys() == found.keys()
            assert [name for name, one in expected.items() if not torch.equal(one, found[name])] == []
    config = json.loads((trained / "later adapter/adapter_config.json").read_text(encoding="utf-8"))
    assert config["r"] == 4 and config["base_model_name_or_path"] == str(trained / "student")
    assert len(load_file(trained / "adapter/adapter_model.safetensors")) == 2 * 2 * 7


def test_another_base_is_refused(trained, ranks, tmp_path):
    """In an export, and in a resumed run: the middle of a file is enough."""
    base = shutil.copytree(trained / "student", tmp_path / "student")
    file = sorted(base.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = next(name for name, one in tensors.items() if one.dim() == 2)
    tensors[name].view(-1)[tensors[name].numel() // 2 :] += 1.0
    save_file(tensors, file, metadata={"format": "pt"})
    (result,) = export(ranks, trained, "--reference-hf", base)
    assert reported_codes(result.stderr) == ["hf-adapter: is not the model"]
    again = flags(trained, "again", *LORA, str(tmp_path / "a"), student_hf=base, load="saved")
    (result,) = run_main(ranks, again)
    assert reported_codes(result.stderr) == ["run-differs: student.base"]


def test_adapters_of_a_checkpoint_are_not_added_to_a_folder(trained, ranks):
    """The run's own export alone knows their base."""
    argv = ["--hf", str(trained / "teacher"), "--save", str(trained / "start")]
    (result,) = run_main(ranks, argv, 1, "mkd.commands.convert")
    assert result.exit_code == 0, result.stderr
    start = {"student_hf": trained / "teacher", "student_load": "start", "load": "on top"}
    (result,) = run_main(ranks, flags(trained, "run 2", *LORA[:2], save="on top", **start))
    assert result.exit_code == 0, result.stderr
    argv = [
        "--load",
        trained / "on top",
        "--hf-out",
        trained / "third",
        "--reference-hf",
        trained / "teacher",
    ]
    (result,) = run_main(ranks, list(map(str, argv)), 1, "mkd.commands.export")
    assert reported_codes(result.stderr) == ["hf-adapter: --export-hf"]
    (result,) = run_main(ranks, flags(trained, "run 3", student_load="on top"))
    assert "hf-adapter" in reported_codes(result.stderr), result.stderr


def test_adapters_are_no_model(trained, ranks):
    (result,) = export(ranks, trained)
    assert reported_codes(result.stderr) == ["hf-adapter: --reference-hf"]
    for given in ({"student_load": "saved"}, {"teacher_load": "saved"}, {"teacher_hf": "adapter"}):
        (result,) = run_main(ranks, flags(trained, "other", **given))
        assert "hf-adapter" in reported_codes(result.stderr), (given, result.stderr)


def test_a_folder_with_a_model_is_not_replaced_by_adapters(trained, ranks):
    (result,) = run_main(ranks, flags(trained, "other", *LORA, str(trained / "teacher"), "--overwrite"))
    assert reported_codes(result.stderr) == ["already-exists: --export-lora"]
