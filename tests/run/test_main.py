"""Check the training command from its arguments to its files.

Plan, records, export, the teacher's share, early ends.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.reported import reported_codes
from tests.tiny_models import add_tokenizer
from tests.train.command import BATCH, flags, make_files, poison, read_metrics, read_weights, run_main

ROOT = Path(__file__).resolve().parent.parent.parent
LOSS_KEYS = {
    "loss",
    "ce_loss",
    "kd_loss",
    "teacher_ce",
    "teacher_entropy",
    "top1_agreement",
    "num_loss_tokens",
}
POSITION_KEYS = {"iteration", "consumed_samples", "consumed_tokens"}
STEP_KEYS = {
    "grad_norm",
    "learning_rate",
    "step_time_ms",
    "teacher_share",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "skipped_iterations",
}
IDS = torch.randint(300, (40,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("main"))


@torch.no_grad()
def mkd_logits(hf: Path, checkpoint: Path | None):
    """Return logits of `IDS` [40, vocabulary] by mkd's model of `hf`, with its weights or a checkpoint's."""
    from mkd.checkpoint.distributed import TrainingState, load_checkpoint
    from mkd.checkpoint.folders import find_checkpoint
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint
    from mkd.checkpoint.hf.hf_weights import load_hf_weights
    from mkd.models.builder import build_model_parts
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.models.model_shape import ModelShape
    from mkd.platform import detect
    from tests.models.test_hf_parity import pack

    context, shape = ParallelContext.create(detect()), ModelShape.from_hf_dir(hf)
    (model,) = build_model_parts(shape, PipelineLayout.even(shape.num_layers, 1), ModelOptions(), context)
    if checkpoint is None:
        load_hf_weights(model, shape, HFCheckpoint(hf), context)
    else:
        load_checkpoint(find_checkpoint(checkpoint), TrainingState([model]), context)
    model.eval()
    hidden = model(IDS[None], torch.arange(IDS.numel())[None], packed_seq_params=pack([IDS.numel()], 0))
    return model.logits(hidden)[:, 0, : shape.vocab_size].clone()


def test_one_process_without_torchrun(files):
    """`python pretrain_kd.py` trains, logs, saves and ends with 0."""
    argv = flags(files, "alone", "--save", files / "alone", "--export-hf", files / "alone hf")
    done = subprocess.run(
        [sys.executable, ROOT / "pretrain_kd.py", *argv],
        cwd=files,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "4 packs = 1 per micro-batch x 4 micro-batches x 1 data-parallel; 4 x 32 = 128 tokens a step"
        in done.stdout
    )
    assert re.search(
        r"^ 2/2  loss .* kd .* ce .* top1 .* lr .* norm .* tok/s  eta .*$", done.stdout, re.MULTILINE
    )
    assert (
        len(done.stdout.splitlines()) < 40
        and max(map(len, done.stdout.replace(str(files), "").splitlines())) < 200
    )
    assert f"exported the student to {files / 'alone hf'}" in done.stdout
    assert (files / "alone" / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    assert (files / "alone" / "config.yaml").exists()
    events = [json.loads(line) for line in (files / "alone" / "events.jsonl").read_text().splitlines()]
    kinds = [(event["iteration"], event["kind"]) for event in events if event["kind"] != "note"]
    assert kinds == [(0, "start"), (2, "save"), (2, "done")]
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    figures = json.loads((files / "alone" / "plan.json").read_text())
    assert figures["num_gpus"] == 1 and figures["step_time_ms"] > 0 and "4 packs = 1" in figures["text"]


def test_dry_run_shows_the_plan_and_loads_nothing(files, ranks):
    argv = flags(
        files, "dry", "--dry-run", "--pipeline-model-parallel-size", 2, "--teacher-pipeline-layout", "2,1"
    )
    first, second = run_main(ranks, argv, world_size=2)
    assert (first.exit_code, second.exit_code) == (0, 0)
    for line in ("student layers by stage: (1, 1)", "teacher layers by stage: (2, 1)", "CPU platform: gloo"):
        assert line in first.stdout
    assert "4 packs = 1 per micro-batch x 4 micro-batches x 1 data-parallel" in first.stdout
    assert "kd.kd_ratio" not in first.stdout and " other settings have their defaults, " in first.stdout
    assert any(
        line.split() == ["training.seq_length", "32", "--seq-length"] for line in first.stdout.splitlines()
    )
    assert second.stdout == ""
    assert not (files / "dry").exists()


@pytest.mark.parametrize("blocked", ["metrics.jsonl", "events.jsonl", "plan.json", ""])
def test_a_log_folder_that_cannot_be_written_ends_the_run_before_it_starts(blocked, files, ranks):
    """A folder is in the way of a file, or, without one, the folder accepts no files even from root."""
    folder = files / f"log {blocked}"
    (folder / blocked).mkdir(parents=True)
    argv = flags(files, "/proc/self" if not blocked else folder)
    (result,) = run_main(ranks, argv)
    assert result.exit_code == 64 and reported_codes(result.stderr) == ["not-writable"]
    assert "Traceback" not in result.stderr and "training" not in result.stdout.partition("loss = ")[2]
    assert [path.name for path in folder.iterdir()] == ([blocked] if blocked else [])


@pytest.mark.parametrize("kd_ratio", [0.3, 0, 1])
def test_metrics_hold_every_key_of_the_contract(kd_ratio, files, ranks):
    run = f"metrics {kd_ratio}"
    more = ("--kd-ratio", kd_ratio, "--kd-temperature", 2, "--eval-interval", 2, "--eval-iters", 2)
    (result,) = run_main(ranks, flags(files, run, *more, "--split", "80,20,0"))
    assert result.exit_code == 0, result.stderr
    lines = read_metrics(files / run)
    steps, evaluations = (
        [line for line in lines if ("split" in line) == is_valid] for is_valid in (False, True)
    )
    assert [line["iteration"] for line in steps] == [1, 2] and [
        line["iteration"] for line in evaluations
    ] == [0, 2]
    assert all(line.keys() == POSITION_KEYS | LOSS_KEYS | STEP_KEYS for line in steps)
    gap = {"gap_closed"} if kd_ratio else set()
    assert all(line.keys() == POSITION_KEYS | LOSS_KEYS | gap | {"split"} for line in evaluations)
    assert {line["split"] for line in evaluations} == {"valid"}
    for line in lines:
        ce, kd = (0.0 if line[key] is None else line[key] for key in ("ce_loss", "kd_loss"))
        assert line["loss"] == pytest.approx((1 - kd_ratio) * ce + kd_ratio * kd, rel=1e-6)
        assert (line["kd_loss"] is None) == (line["teacher_ce"] is None) == (kd_ratio == 0)
        assert (line["ce_loss"] is None) == (kd_ratio == 1 and "split" not in line)
    for line in steps:
        assert (line["teacher_share"] is None) if kd_ratio == 0 else (0 < line["teacher_share"] < 1)
    assert steps[1]["consumed_samples"] == 2 * BATCH and steps[1]["consumed_tokens"] == 2 * BATCH * 32


def test_a_learning_rate_of_0_and_no_evaluation(files, ranks):
    """As in Megatron, --lr 0 changes no weight, and --eval-iters 0 disables evaluations, tasks included."""
    (files / "tasks.jsonl").write_text('{"prompt": "the quick", "completion": " brown fox"}\n')
    more = ("--lr", 0, "--eval-interval", 1, "--eval-iters", 0, "--eval-completions", files / "tasks.jsonl")
    argv = flags(files, "idle", *more, "--export-hf", files / "idle hf")
    (result,) = run_main(ranks, argv)
    assert result.exit_code == 0, result.stderr
    assert [line.get("split") for line in read_metrics(files / "idle")] == [None, None]
    before, after = read_weights(files / "student"), read_weights(files / "idle hf")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_kd_ratio_0_never_touches_the_teacher(files, ranks):
    """Training is bitwise the same with no teacher, a NaN teacher, and one that does not exist."""
    poison(files / "teacher", files / "nan teacher", float("nan"))
    weights, losses = {}, {}
    for teacher in (None, "nan teacher", "no teacher here"):
        run = f"sft {teacher}"
        argv = flags(files, run, "--kd-ratio", 0, "--export-hf", files / f"{run} hf", teacher_hf=teacher)
        (result,) = run_main(ranks, argv)
        assert result.exit_code == 0, result.stderr
        assert "teacher layers" not in result.stdout
        weights[teacher] = read_weights(files / f"{run} hf")
        losses[teacher] = [line["loss"] for line in read_metrics(files / run)]
    for teacher in ("nan teacher", "no teacher here"):
        assert losses[teacher] == losses[None]
        assert weights[teacher].keys() == weights[None].keys()
        assert all(torch.equal(weights[teacher][name], weights[None][name]) for name in weights[None])


def test_export_is_the_checkpoint_and_reloads_in_transformers(files, ranks):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save, exported = files / "export", files / "export hf"
    argv = flags(files, "export", "--save", save, "--export-hf", exported, "--tensor-model-parallel-size", 2)
    assert [result.exit_code for result in run_main(ranks, argv, world_size=2)] == [0, 0]
    of_export, of_checkpoint = (ranks.run(mkd_logits, 1, exported, saved)[0] for saved in (None, save))
    assert torch.equal(of_export, of_checkpoint)
    before = read_weights(files / "student")
    assert any(not torch.equal(tensor, before[name]) for name, tensor in read_weights(exported).items())
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(IDS[None]).logits[0]
    assert (of_export - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert AutoTokenizer.from_pretrained(exported).eos_token == "<|endoftext|>"


def test_what_is_written_carries_the_tokenizer_of_the_run(files, ranks, tmp_path):
    """Exports never carry the student folder's tokenizer, whose ids mean other strings.

    This also holds for an export from a checkpoint.
    """
    from transformers import AutoTokenizer

    text = "pack my box with five dozen liquor jugs. "
    given, save = add_tokenizer(tmp_path / "given", text=text), tmp_path / "checkpoints"
    argv = flags(
        files,
        "given",
        "--tokenizer-model",
        given,
        "--save",
        save,
        "--export-hf",
        tmp_path / "hf",
        "--kd-ratio",
        0,
    )
    (result,) = run_main(ranks, argv)
    assert result.exit_code == 0, result.stderr
    (note,) = [line for line in result.stdout.splitlines() if line.startswith("note: --tokenizer-model")]
    assert note.startswith(
        f"note: --tokenizer-model {given} is not the tokenizer in {files / 'student'}, ids differ: id "
    )
    command = [
        sys.executable,
        ROOT / "tools" / "convert_mcore_to_hf.py",
        "--load",
        save,
        "--hf-out",
        tmp_path / "converted",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    ids, others = (
        AutoTokenizer.from_pretrained(folder)(text).input_ids for folder in (given, files / "student")
    )
    assert ids != others
    for folder in (tmp_path / "hf", tmp_path / "converted", save / "iter_0000002" / "hf"):
        assert AutoTokenizer.from_pretrained(folder)(text).input_ids == ids
        assert (folder / "config.json").exists()


def test_exit_duration_stops_after_the_step_and_saves(files, ranks):
    """Minutes that pass during the first step end the run after it, on every rank.

    The run can resume from its checkpoint.
    """
    save = files / "minutes"
    argv = flags(files, "minutes", "--save", save, "--load", save)
    results = run_main(ranks, [*argv, "--exit-duration-in-mins", "1e-6"], world_size=2)
    assert [result.exit_code for result in results] == [0, 0]
    reason = "the time of --exit-duration-in-mins is over"
    assert results[0].stdout.count(reason) == 1, "said twice"
    events = [json.loads(line) for line in (save / "events.jsonl").read_text().splitlines()]
    assert [one["text"] for one in events if one["kind"] == "stopped"] == [
        f"stopped at iteration 1: {reason}"
    ]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    results = run_main(ranks, [*argv, "--exit-duration-in-mins", "60"], world_size=2)
    assert [result.exit_code for result in results] == [0, 0] and "stopped" not in results[0].stdout
    assert [line["iteration"] for line in read_metrics(save)] == [1, 2]
