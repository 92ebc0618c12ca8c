"""No command that writes a model, a corpus or a relation replaces one unless it is told to."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.reported import reported_codes
from tests.train.command import flags, make_files, read_metrics, run_main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make models and a text, a folder with another model and a corpus, and a run with an export."""
    folder = make_files(tmp_path_factory.mktemp("overwriting"))
    taken = folder / "taken"
    taken.mkdir()
    for name in ("config.json", "model.safetensors", "notes.txt", "r.npz", "c.idx", "train-00000.parquet"):
        (taken / name).write_text(f"another {name}")
    (taken / "iter_0000003").mkdir()
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command_of(name, files):
    """Return (module, arguments) of a command that would write to `taken`."""
    student, out = files / "student", files / "taken"
    tokenizer = ("--tokenizer-model", student)
    found = {
        "make-student": ("make_student", "--hf", files / "teacher", "--num-layers", 1, "--out", out),
        "export": ("export", "--load", files / "missing", "--hf-out", out),
        "convert": ("convert", "--hf", student, "--save", out),
        "preprocess": (
            "preprocess",
            "--input",
            files / "text.jsonl",
            *tokenizer,
            "--output-prefix",
            out / "c",
        ),
        "projection": ("projection", "--student", student, "--teacher", student, "--output", out / "r.npz"),
        "topk": ("topk", "--out", out, "--k", 4, *flags(files, "topk")),
    }
    module, *words = found[name]
    return import_module(f"mkd.commands.{module}"), [str(word) for word in words]


@pytest.mark.parametrize(
    "name, code",
    [
        ("make-student", "already-exists: holds a model"),
        ("export", "already-exists: holds a model"),
        ("convert", "save-folder-taken: already holds checkpoints"),
        ("preprocess", "already-exists: --output-prefix"),
        ("projection", "already-exists: exists"),
        ("topk", "choose-another-folder: holds a model"),
    ],
)
def test_what_is_there_stays(name, code, files, capsys):
    before = contents(files / "taken")
    module, argv = command_of(name, files)
    assert module.main(argv) in (64, 65, 66)
    assert reported_codes(capsys.readouterr().err) == [code]
    assert contents(files / "taken") == before


@pytest.mark.parametrize("name", ["make-student", "preprocess", "projection"])
def test_overwrite_replaces_it(name, files, capsys):
    module, argv = command_of(name, files)
    assert module.main([*argv, "--overwrite"]) == 0, capsys.readouterr().err
    assert (files / "taken" / "notes.txt").read_text() == "another notes.txt"


def test_a_run_replaces_only_its_own_export(files, ranks):
    """A start with a taken --export-hf ends before the first step; a run that resumes may export again."""
    out, save = files / "exported", files / "run"
    argv = flags(files, "run", "--save", save, "--load", save, "--export-hf")
    (other,) = run_main(ranks, [*argv, str(files / "student")])
    assert other.exit_code == 64 and "choose-another-folder" in other.stderr
    out.mkdir()
    (out / "model.safetensors").write_text("another model")
    (refused,) = run_main(ranks, [*argv, str(out)])
    assert refused.exit_code == 64 and "error[already-exists]" in refused.stderr, refused.stderr
    assert (out / "model.safetensors").read_text() == "another model" and not save.exists()
    for more in (("--overwrite",), (), ("--train-iters", "3")):  # the last two start the same run again
        (result,) = run_main(ranks, [*argv, str(out), *more])
        assert result.exit_code == 0 and "exported the student" in result.stdout, result.stderr
    assert [line["iteration"] for line in read_metrics(save)] == [1, 2, 3]
    before = contents(out)
    (out / "config.json").write_text("{}")  # by hand
    assert [one.exit_code for one in run_main(ranks, [*argv, str(out)])] == [64]
    fresh = flags(files, "fresh", "--export-hf", out)
    assert [one.exit_code for one in run_main(ranks, fresh)] == [64]
    assert contents(out).keys() == before.keys() and (out / "config.json").read_text() == "{}"
