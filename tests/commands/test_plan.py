"""Check that `mkd plan` plans a run without torch, data or weights."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mkd.commands.plan import main
from tests.reported import reported_codes
from tests.train.command import flags, make_files, run_main

ROOT = Path(__file__).resolve().parents[2]
SIZES = dict(model_type="llama", hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=300)


@pytest.fixture
def models(tmp_path) -> list[str]:
    """Return the flags for two folders that hold only a config.json."""
    words = []
    for role, layers in (("student", 6), ("teacher", 9)):
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text(json.dumps({**SIZES, "num_hidden_layers": layers}))
        words += [f"--{role}-hf", str(tmp_path / role)]
    return words


def test_plan_without_torch(models):
    """Run the tool as a command, and print the modules that it has loaded."""
    code = "import sys; from mkd.commands.plan import main; code = main(sys.argv[1:]); "
    code += "print([m for m in ('torch', 'megatron', 'transformers') if m in sys.modules]); sys.exit(code)"
    argv = [*models, "--world-size", "4", "--pipeline-model-parallel-size", "2", "--pipeline-layout", "auto"]
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    *plan, totals, note, modules = done.stdout.splitlines()
    assert modules == "[]" and note.startswith("note: this run computes in fp32. ")
    assert re.fullmatch(r"1,000 steps: .*, .* GPU-hours, .* tokens; on disk a checkpoint .*", totals)
    assert plan[0].startswith("2 packs = 1 per micro-batch x 1 micro-batch x 2 data-parallel")
    assert plan[1].startswith("student layers by stage: (")
    assert plan[-2].startswith("memory of pipeline rank 1: ")
    assert plan[-1].startswith("layers as CUDA graphs: student, teacher (")


def test_plan_in_less_than_a_second(models):
    """Measure CPU time, because other processes slow down the clock time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "tools/plan.py", *models], cwd=ROOT, capture_output=True, check=True, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_it_says_what_a_dry_run_says(tmp_path, ranks, capsys):
    files = make_files(tmp_path)
    argv = flags(files, "dry", "--pipeline-model-parallel-size", 2, "--teacher-pipeline-layout", "2,1")
    argv += ["--device-memory-gib", "1"]
    assert main([*argv, "--world-size", "2"]) == 0
    shown = capsys.readouterr().out
    first, _ = run_main(ranks, [*argv, "--dry-run"], world_size=2)
    common, _, totals = shown.rpartition("2 steps: ")
    assert "memory of pipeline rank 1: " in common and "memory: does not fit; " in common
    assert common in first.stdout
    # a dry run knows how many steps are left, and says so once in its verdict
    assert totals and "GPU-hours" not in first.stdout and totals not in first.stdout


def test_every_teacher_is_planned(models, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    second = {"name": "own", "hf": models[1], "xtoken": {"seq_length": 4096}}
    file.write_text(json.dumps({"teachers": [{"name": "same"}, second]}))
    argv = [*models, "--config", str(file), "--world-size", "2", "--pipeline-model-parallel-size", "2"]
    assert main([*argv, "--pipeline-layout", "auto"]) == 0
    shown = capsys.readouterr().out
    assert "teacher same layers by stage: (" in shown
    assert "teacher own layers by stage: (" in shown and "; packs of 4096 tokens of its own" in shown
    second["hf"] = "nowhere-at-all/"
    file.write_text(json.dumps({"teachers": [{"name": "same"}, second]}))
    assert main(argv) == 64
    assert "teachers[1].hf: the folder nowhere-at-all/ does not exist" in capsys.readouterr().err


def test_short_documents_make_attention_cheaper(models, capsys):
    def step_ms(*more: str) -> float:
        assert main([*models, "--seq-length", "65536", *more]) == 0
        line = next(
            line for line in capsys.readouterr().out.splitlines() if line.startswith("predicted step: ")
        )
        return float(line.split()[2])

    assert step_ms("--document-length", "512") < step_ms() < 0.5 * step_ms("--document-length", "65536")


def test_a_hub_model_that_cannot_be_reached_is_one_quick_error(models, capsys, monkeypatch):
    """The hub's library alone tries again for more than a minute, with lines of its own."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    before = time.monotonic()
    assert main([*models, "--teacher-hf", "nobody/no-such-model"]) == 66
    assert time.monotonic() - before < 10
    message = capsys.readouterr().err
    assert reported_codes(message) == ["hf-model-not-found"] and len(message.splitlines()) == 3


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["--world-size", "3", "--tensor-model-parallel-size", "2"], 64, "3 processes cannot be divided"),
        (
            ["--world-size", "4", "--pipeline-model-parallel-size", "4"],
            64,
            "6 layers do not divide over 4 pipeline stages",
        ),
        (["--tensor-model-parallel-size", "2"], 64, "`mkd plan --world-size 2`"),
        (["--world-size", "0"], 64, "--world-size"),
        (["--world-size", "4", "--no-such-flag"], 64, "--no-such-flag is not a flag of mkd"),
        (["--teacher-hf", "nowhere-at-all/"], 66, "nowhere-at-all"),
    ],
)
def test_refusals_have_the_exit_codes_of_a_run(models, capsys, argv, code, text):
    assert main([*models, *argv]) == code
    assert text in capsys.readouterr().err
