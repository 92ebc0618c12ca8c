"""Profiles of some steps, memory histories, and the loss card."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mkd.config.schema import KDConfig, LogConfig, TeacherConfig
from mkd.errors import Preempted
from mkd.kinds.loss_card import Term
from mkd.losses import build_divergence
from mkd.losses.kd_objective import TEMPERATURE_SCALINGS
from mkd.operations.profiling import Profiler, profile_problems
from mkd.train.teachers.base import divergence_settings
from tests.train.command import flags, make_files, run_main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("profile"))


def operations(path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_chosen_steps_of_chosen_ranks_are_traced(files, ranks):
    more = ("--profile", "--profile-steps", 2, 2)
    results = run_main(
        ranks, flags(files, "traced", *more, "--profile-ranks", 1, "--train-iters", 3), world_size=2
    )
    assert [result.exit_code for result in results] == [0, 0], results[0].stderr
    folder = files / "traced" / "profile"
    assert [path.name for path in folder.iterdir()] == ["trace_rank1.json.gz"]
    assert "aten::mm" in operations(folder / "trace_rank1.json.gz")
    card = (files / "traced" / "loss_card.txt").read_text(encoding="utf-8")
    loss = card.splitlines()[1].split(maxsplit=1)[1]
    assert card.startswith("loss card\n  loss ") and f"loss: {loss}; its formula is in " in results[0].stdout


def test_the_loss_card_reads_the_settings_that_the_loss_reads():
    settings = KDConfig(kd_temperature=2.0, kd_divergence="jsd", kd_jsd_beta=0.3, kd_mixed_kl_weight=0.2)
    own = TeacherConfig(temperature=4.0, divergence="mixed_kl", mixed_kl_weight=0.9, jsd_beta=0.1)
    for kd in (settings, replace(settings, kd_temperature_scaling="none")):
        for teacher in (None, TeacherConfig(), own):
            term, used = Term.of(kd, teacher), divergence_settings(kd, teacher or TeacherConfig())
            built = build_divergence(term.divergence.name, term.divergence.parameter)
            assert used == dict(
                temperature=term.temperature, temperature_scaling=term.scaling, divergence=built
            )
            assert term.scale == TEMPERATURE_SCALINGS[term.scaling](term.temperature)


@pytest.mark.parametrize(("iterations", "steps"), [((0, 1, 2, 3), 2), ((2, 3), 1), ((0, 1), 1), ((3, 4), 0)])
def test_the_first_and_the_last_step_are_profiled(tmp_path, iterations, steps):
    """The range is steps 2 and 3, also if a run resumes between them or ends earlier."""
    import torch

    log = LogConfig(profile=True, profile_steps=("2", "3"))
    profiler = Profiler.from_config(log, tmp_path / "profile", rank=0)
    for iteration in iterations:
        profiler.at(iteration)
        torch.ones(4).sinh()
    profiler.close()
    profiler.close()
    if not steps:
        assert not (tmp_path / "profile").exists()
    else:
        assert operations(tmp_path / "profile" / "trace_rank0.json.gz").count("aten::sinh") == steps


def test_phases_are_ranges_for_nsight_systems(tmp_path, monkeypatch):
    """Only in the profiled steps, one range a phase, all of them closed."""
    import torch

    from mkd.operations.phases import DATA, EVAL, FORWARD_BACKWARD, OPTIMIZER, Phases

    calls = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    recorder = SimpleNamespace(
        cudaProfilerStart=lambda: calls.append("on"), cudaProfilerStop=lambda: calls.append("off")
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: recorder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    log = LogConfig(profile=True, profile_steps=("2", "2"))
    phases = Phases(Profiler.from_config(log, tmp_path, rank=0))
    for iteration in (1, 2, 3):
        for phase in (DATA, FORWARD_BACKWARD, OPTIMIZER):
            with phases(phase, iteration):
                pass
        assert list(phases.each(EVAL, iteration, "ab")) == ["a", "b"]
    steps = ["data 2", "end", "forward_backward 2", "end", "optimizer 2", "end", "eval 2", "end", "eval 2"]
    assert calls in (["on", *steps, "off", "end"], ["on", *steps, "end", "off"])


class Recorder:
    """Replaces CUDA's recorder on machines without a GPU.

    Records the calls, and writes their number as a snapshot.
    """

    def __init__(self, monkeypatch):
        import torch

        self.calls = []
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self.dump)

    def record(self, enabled="all", max_entries=0):
        self.calls.append("on" if enabled else "off")

    def dump(self, path):
        self.calls.append("written")
        Path(path).write_text(str(len(self.calls)))


@pytest.mark.parametrize(
    ("iterations", "error", "calls"),
    [
        (5, None, ["on", "written", "off"]),  # when the steps are done
        # the failure's snapshot replaces the one after the steps
        (5, RuntimeError(), ["on", "written", "written", "off"]),
        (5, Preempted("", code="example"), ["on", "written", "off"]),
        (2, RuntimeError(), ["on", "written", "off"]),
        (0, RuntimeError(), ["on", "written", "off"]),
        (2, None, ["on", "written", "off"]),
    ],
)
def test_the_memory_history_lasts_until_the_run_ends(iterations, error, calls, tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    log = LogConfig(record_memory_history=True, profile_steps=("2", "3"))
    profiler = Profiler.from_config(log, tmp_path, rank=0)
    for iteration in range(iterations):
        profiler.at(iteration)
        assert "off" not in recorder.calls
    profiler.close(error)
    profiler.close(error)
    assert recorder.calls == calls
    assert (tmp_path / "memory_rank0.pickle").read_text() == str(len(calls) - 1)


def fail_in_build(argv):
    """Return the recorder's calls in a run whose GPU is too small for its models."""
    import torch

    from mkd.config.load import load_config
    from mkd.operations.cleanup import Cleanup
    from mkd.platform import detect
    from mkd.run import setup
    from mkd.run.plan_run import plan_run

    def build_engine(*args):
        raise torch.OutOfMemoryError("models")

    plan = plan_run(load_config(argv).config, 1)
    config = replace(plan.config, log=replace(plan.config.log, record_memory_history=True))
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        patch.setattr(setup, "build_engine", build_engine)
        with pytest.raises(torch.OutOfMemoryError, match="models"), Cleanup() as cleanup:
            setup.build_run(
                replace(plan, facts=replace(plan.facts, config=config)), detect(), cleanup=cleanup
            )
    return recorder.calls


def test_the_memory_history_of_models_that_do_not_fit(files, ranks):
    assert ranks.run(fail_in_build, 1, flags(files, "small GPU")) == [["on", "written", "off"]]
    assert (files / "small GPU" / "profile" / "memory_rank0.pickle").exists()


def test_what_cannot_be_profiled_is_said_before_the_run():
    """Runs on a machine without a GPU."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    (history,) = profile_problems(LogConfig(profile=True, record_memory_history=True), world_size=1)
    assert "--record-memory-history" in history.what
    (beyond,) = profile_problems(LogConfig(profile=True, profile_ranks=("0", "4")), world_size=4)
    assert beyond.what == "--profile-ranks 4 do not exist"
    assert list(profile_problems(LogConfig(), world_size=1)) == []
