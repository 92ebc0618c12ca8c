"""Check two teachers on one schedule: messages, states alive at once, the records of a run, and resuming."""

from __future__ import annotations

import json
import shutil

import pytest
import torch.distributed as dist

from tests.train.command import flags, read_metrics, read_weights, run_main
from tests.train.cross_tokenizer_invariance import build, make_files
from tests.train.invariance import NOT_AHEAD, NUM_PACKS, SEQ_LENGTH, SP, Layout

WIDTHS = 48, 72, 48  # hidden sizes: student, cross-tokenizer teacher, teacher with the student's tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("several"))


def sent_elements(layout, files):
    """Return (elements that this rank sends to other stages, tokens of the first teacher's packs).

    Teachers are not ahead, so that their states travel with the student's.
    """
    from mkd.train.step import train_step

    engine, _, batches, seq_lengths = build(layout.with_flags(NOT_AHEAD), files, "partition_kl")
    sent, original = [], dist.P2POp

    class Counted(original):
        def __new__(cls, op, tensor, peer, group):
            if op is dist.isend:
                sent.append(tensor.numel())
            return original(op, tensor, peer, group)

    dist.P2POp = Counted
    try:
        train_step(engine, batches)
    finally:
        dist.P2POp = original
    return sum(sent), seq_lengths[0]


LONG_WIRES = Layout("PP4", 4, pp=4), Layout("TP2 PP2 SP", 4, tp=2, pp=2, flags=SP)
WIRES = Layout("PP2", 2, pp=2), *(pytest.param(layout, marks=pytest.mark.slow) for layout in LONG_WIRES)


@pytest.mark.parametrize("layout", WIRES, ids=lambda layout: layout.name)
def test_what_is_on_the_wire(layout, files, ranks):
    """Forward sends T h_s + T' h_1 + T h_2, backward T h_s; over tp with sequence parallelism.

    T' are the tokens of the first teacher.
    """
    shards = layout.tp if layout.flags else 1
    for rank, (sent, own_length) in enumerate(ranks.run(sent_elements, layout.ranks, layout, files)):
        stage, tokens = rank // layout.tp, NUM_PACKS * SEQ_LENGTH // shards
        forward = tokens * (WIDTHS[0] + WIDTHS[2]) + NUM_PACKS * own_length // shards * WIDTHS[1]
        backward = tokens * WIDTHS[0]
        assert own_length != SEQ_LENGTH
        assert sent == forward * (stage < layout.pp - 1) + backward * (stage > 0)


def peak_teacher_states(layout, files, repeats):
    """Return the most outputs of teachers alive at once on this rank, in one step.

    The step has `repeats` times the global batch.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    from mkd.models.language_model import LanguageModel
    from mkd.train.step import train_step

    engine, _, batches, _ = build(layout.with_flags(NOT_AHEAD), files, "partition_kl")
    teachers = [teacher for chunk in engine.stages for teacher in chunk.module.teachers]
    states, peak, forward = [], [], LanguageModel.forward

    def watched(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        if self in teachers:
            states.append(StorageWeakRef(output.untyped_storage()))  # the storage, whatever tensor uses it
            peak.append(sum(not state.expired() for state in states))
        return output

    LanguageModel.forward = watched
    try:
        train_step(engine, batches * repeats)
    finally:
        LanguageModel.forward = forward
    return max(peak)


@pytest.mark.parametrize("layout", [Layout("PP1"), Layout("PP2", 2, pp=2)], ids=lambda layout: layout.name)
def test_teacher_states_alive_do_not_grow_with_the_global_batch(layout, files, ranks):
    small, large = (
        ranks.run(peak_teacher_states, layout.ranks, layout, files, repeats) for repeats in (1, 4)
    )
    assert small == large == [2] * layout.ranks, "those of one micro-batch, on every stage"


def command(files, run, *more):
    """Return the command line of two updates with both teachers."""
    own = dict(student_hf=None, teacher_hf=None)
    argv = flags(files, run, "--eval-interval", 2, "--split", "90,10", *more, **own)
    return [*argv, "--config", str(files / "partition_kl.yaml")]


def test_what_a_run_writes(files, ranks):
    (result,) = run_main(ranks, command(files, "run", "--kd-ratio", 0.3))
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    for name in ("training", "held-out"):
        (index,) = (
            i
            for i, line in enumerate(lines)
            if line.startswith(f" {name} ") and "packs of 32 tokens, " in line
        )
        assert (
            lines[index + 1].startswith("   cross: packs of ")
            and "share of loss tokens in chunks" in lines[index + 1]
        )
    train = [record for record in read_metrics(files / "run") if record.get("split", "train") == "train"]
    assert len(train) == 2
    for record in read_metrics(files / "run"):
        kd = sum(record[f"teacher_weight/{name}"] * record[f"kd_loss/{name}"] for name in ("cross", "same"))
        assert record["kd_loss"] == pytest.approx(kd, rel=1e-6)
        assert record["loss"] == pytest.approx(0.7 * record["ce_loss"] + 0.3 * record["kd_loss"], rel=1e-6)
        assert record["teacher_weight/cross"] == pytest.approx(2 / 3) and record["num_aligned/cross"] > 0
        assert record["kd_loss/cross"] != record["kd_loss/same"]


INTERVAL = ("--log-interval", 3, "--train-iters", 7, "--lr-decay-iters", 7, "--eval-interval", 7)


def assert_identities(record):
    """Check docs/teachers.md: kd_loss is the weighted sum over teachers, loss that of both parts."""
    kd = sum(record[f"teacher_weight/{name}"] * record[f"kd_loss/{name}"] for name in ("cross", "same"))
    assert record["kd_loss"] == pytest.approx(kd, rel=1e-9)
    assert record["loss"] == pytest.approx(0.7 * record["ce_loss"] + 0.3 * record["kd_loss"], rel=1e-9)


@pytest.fixture(scope="module")
def intervals(files, ranks):
    """Return records of a run whose lines are means over three steps of different sizes (chunks, tokens)."""
    more = ("--teacher-weighting", "ce", "--kd-ratio", 0.3, *INTERVAL)
    (result,) = run_main(ranks, command(files, "intervals", *more))
    assert result.exit_code == 0, result.stderr
    return read_metrics(files / "intervals")


def test_logged_intervals_obey_the_identities(intervals):
    train = [record for record in intervals if record.get("split", "train") == "train"]
    assert [record["iteration"] for record in train] == [3, 6, 7]
    assert [(record["iteration"], "split" in record) for record in intervals[-2:]] == [(7, False), (7, True)]
    assert len(intervals) == len(train) + 2, "evaluations before the first step and after the last"
    for record in intervals:
        assert_identities(record)


def test_an_interval_is_the_mean_over_its_rows(intervals, files, ranks):
    """Log every step separately: rows and losses of a line are sums over those of its steps."""
    more = ("--teacher-weighting", "ce", "--kd-ratio", 0.3, *INTERVAL, "--log-interval", 1)
    (result,) = run_main(ranks, command(files, "every", *more))
    assert result.exit_code == 0, result.stderr
    steps = [record for record in read_metrics(files / "every") if record.get("split", "train") == "train"]
    line = next(record for record in intervals if record["iteration"] == 3)
    for name in ("cross", "same"):
        rows = [step[f"num_aligned/{name}"] for step in steps[:3]]
        assert line[f"num_aligned/{name}"] == pytest.approx(sum(rows) / 3)
        parts = [step[f"teacher_weight/{name}"] * step[f"kd_loss/{name}"] for step in steps[:3]]
        mean = sum(count * part for count, part in zip(rows, parts, strict=True)) / sum(rows)
        assert line[f"teacher_weight/{name}"] * line[f"kd_loss/{name}"] == pytest.approx(mean, rel=1e-9)
    assert len({step["num_aligned/cross"] / step["num_loss_tokens"] for step in steps[:3]}) > 1


def test_an_open_interval_goes_into_the_checkpoint(intervals, files, ranks):
    """Saved in the middle of a line and resumed, the line is the same, bit for bit."""
    more = ("--teacher-weighting", "ce", "--kd-ratio", 0.3, *INTERVAL, "--save", files / "open")
    (result,) = run_main(ranks, command(files, "open run", *more, "--save-interval", 2))
    assert result.exit_code == 0, result.stderr
    for folder in (files / "open").glob("iter_*"):
        if folder.name != "iter_0000002":
            shutil.rmtree(folder)
    (files / "open" / "latest_checkpointed_iteration.txt").write_text("2")
    (result,) = run_main(ranks, command(files, "open run", *more, "--load", files / "open"))
    assert result.exit_code == 0, result.stderr
    measured = ("step_time_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "teacher_share")
    for ours, theirs in zip(read_metrics(files / "open run"), intervals, strict=True):
        assert {key: value for key, value in ours.items() if key not in measured} == {
            key: value for key, value in theirs.items() if key not in measured
        }


@pytest.mark.slow
def test_resuming_is_bitwise(files, ranks):
    whole, half, rest = (files / name for name in ("whole", "half", "rest"))
    for run, more in (
        (whole, ("--train-iters", 4, "--export-hf", files / "whole hf")),
        (half, ("--train-iters", 4, "--exit-interval", 2, "--save", files / "saved")),
        (rest, ("--train-iters", 4, "--load", files / "saved", "--export-hf", files / "rest hf")),
    ):
        (result,) = run_main(ranks, command(files, run.name, *more))
        assert result.exit_code == 0, result.stderr
    ours, reference = read_weights(files / "rest hf"), read_weights(files / "whole hf")
    assert ours.keys() == reference.keys() and all(ours[name].equal(reference[name]) for name in ours)
    losses = {
        record["iteration"]: record["loss"]
        for record in read_metrics(whole)
        if record.get("split", "train") == "train"
    }
    resumed = {
        record["iteration"]: record["loss"]
        for record in read_metrics(rest)
        if record.get("split", "train") == "train"
    }
    assert list(resumed) == [3, 4] and all(losses[iteration] == loss for iteration, loss in resumed.items())


def test_weights_by_what_teachers_say_reach_the_metrics(files, ranks):
    more = ("--teacher-weighting", "ce", "--teacher-weighting-temperature", 2)
    (result,) = run_main(ranks, command(files, "weighting", *more))
    assert result.exit_code == 0, result.stderr
    for record in read_metrics(files / "weighting"):
        json.dumps(record, allow_nan=False)
        assert 0 < record["teacher_weight/cross"] < 1
        assert record["teacher_weight/cross"] != pytest.approx(2 / 3, abs=1e-3)
