"""Start the converters and the parity check as a user does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mkd.commands import convert, export, parity
from mkd.convert import hf_to_mcore, mcore_to_hf
from mkd.convert.models import DTYPES
from mkd.errors import EXIT_CHECKPOINT, EXIT_USAGE
from tests.checkpoint.saved_tensors import all_tensors
from tests.reported import refused
from tests.tiny_models import make_model
from tests.tokenizers.test_tokenizer_files import with_digits, write

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("original"), "llama")  # padded groups and vocabulary at TP=2


@pytest.fixture(scope="module")
def checkpoint(original, tmp_path_factory):
    """Return a checkpoint of `original`, converted by two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("checkpoint") / "mcore"
    result = start("convert_hf_to_mcore.py", "--hf", original, "--save", folder, tensor_parallel=2)
    assert result.returncode == 0, result.stderr
    assert f"saved llama, 4 layers, float32, to {folder / 'iter_0000000'}" in result.stdout
    return folder


def start(tool, *args, tensor_parallel=1):
    """Run a tool in its own process or processes."""
    command = [sys.executable]
    if tensor_parallel > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tensor_parallel)]
        args = (*args, "--tensor-model-parallel-size", tensor_parallel)
    command += [str(ROOT / "tools" / tool), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)


def exit_code(command, *args):
    return command.main([str(arg) for arg in args])


def test_there_and_back_at_another_layout_is_bitwise(original, checkpoint, tmp_path):
    result = start("convert_mcore_to_hf.py", "--load", checkpoint, "--hf-out", tmp_path / "back")
    assert result.returncode == 0, result.stderr
    found, expected = all_tensors(tmp_path / "back"), all_tensors(original)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert (tmp_path / "back" / "generation_config.json").exists()


def test_an_export_whose_tokenizer_transformers_rebuilds_has_a_warning(tmp_path):
    model = make_model(tmp_path / "model", "qwen2", vocab_size=320, num_hidden_layers=1)
    write(model, with_digits(), None, "Qwen2Tokenizer")
    assert start("convert_hf_to_mcore.py", "--hf", model, "--save", tmp_path / "mcore").returncode == 0
    result = start("convert_mcore_to_hf.py", "--load", tmp_path / "mcore", "--hf-out", tmp_path / "back")
    assert result.returncode == 0
    assert result.stderr.count(f"does not read {tmp_path / 'back' / 'tokenizer.json'} as it is") == 1


def test_parity_of_a_checkpoint_with_transformers(original, checkpoint):
    result = start("check_parity.py", "--hf", original, "--load", checkpoint, "--tolerance", "1e-5")
    assert result.returncode == 0, result.stderr
    assert "top-1 agreement 1.000000" in result.stdout


@pytest.mark.slow
def test_parity_fails_for_another_model(original, tmp_path):
    other = make_model(tmp_path / "other", "llama", seed=1)
    result = start("check_parity.py", "--hf", original, "--hf-b", other)
    assert result.returncode == EXIT_CHECKPOINT
    assert "max |dlogit|" in result.stdout and "beyond the tolerances: 0.0001" in result.stderr


def test_dtypes_are_those_of_the_conversion():
    assert tuple(DTYPES) == convert.DTYPES


def test_wrong_number_of_processes(original, tmp_path, capsys):
    args = ["--hf", original, "--save", tmp_path / "new", "--pipeline-model-parallel-size", 4]
    assert exit_code(convert, *args) == EXIT_USAGE
    message = capsys.readouterr().err
    assert "tensor-model-parallel-size 1 x pipeline-model-parallel-size 4 is not 1 process" in message
    assert "torchrun --nproc-per-node 4" in message


def test_a_folder_of_a_run_is_not_overwritten(original, checkpoint, capsys):
    assert exit_code(convert, "--hf", original, "--save", checkpoint) == EXIT_CHECKPOINT
    assert "already holds checkpoints" in capsys.readouterr().err


def test_a_call_from_python_replaces_nothing_either(original, checkpoint, tmp_path, ranks):
    with refused("save-folder-taken: already holds checkpoints"):
        hf_to_mcore.run(str(original), checkpoint, None, 1, 1)
    (tmp_path / "config.json").write_text("another model")
    ranks.run(export_is_refused, 1, checkpoint, tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["another model"]


def export_is_refused(load, out):
    """Check this on a rank of the pool."""
    with refused("already-exists: holds a model"):
        mcore_to_hf.run(load, None, out, None, None, 1, 1)


def test_nothing_to_convert(tmp_path, capsys):
    args = ["--load", tmp_path, "--hf-out", tmp_path / "out"]
    assert exit_code(export, *args) == EXIT_CHECKPOINT
    assert f"--load {tmp_path} holds no checkpoint" in capsys.readouterr().err


def test_a_checkpoint_that_does_not_say_what_it_is(tmp_path, capsys):
    (tmp_path / "metadata.json").write_text("{}")
    args = ["--load", tmp_path, "--hf-out", tmp_path / "out"]
    assert exit_code(export, *args) == EXIT_CHECKPOINT
    assert "--reference-hf" in capsys.readouterr().err


def test_the_configuration_of_another_model(original, checkpoint, tmp_path, capsys):
    """The checkpoint has the same tensors in other places: an unchecked export would be nonsense."""
    other = make_model(tmp_path / "other", "llama", num_key_value_heads=6)
    args = ["--load", checkpoint, "--hf-out", tmp_path / "out", "--reference-hf", other]
    assert exit_code(export, *args) == EXIT_CHECKPOINT
    assert (
        "is a checkpoint of another model: it has num_query_groups 3 instead of 6" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_nothing_to_compare(original, capsys):
    assert exit_code(parity, "--hf", original, "--num-tokens", 0) == EXIT_USAGE
    assert "nothing would be compared" in capsys.readouterr().err
