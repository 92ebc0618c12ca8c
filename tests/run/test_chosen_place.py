"""Runs with --teacher-processes auto, each rank a process: one place for all ranks, and for a resumed run."""

from __future__ import annotations

import json

import pytest
import yaml

from mkd.errors import EXIT_DONE
from tests.reported import reported_codes
from tests.train.command import flags, make_files, run_main
from tests.train.processes import run_processes

AUTO = ("--teacher-processes", "auto")
KNOWN = ("--device-memory-gib", "80")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("auto"))


def start(tmp_path, argv: list[str], processes: int = 2) -> list[str]:
    """Return what each rank said."""
    ended = run_processes(tmp_path, argv, processes)
    assert [one.code for one in ended] == [EXIT_DONE] * processes, [one.output for one in ended]
    return [one.output for one in ended]


def losses(folder) -> list[tuple]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(one["loss"], one["grad_norm"]) for one in records]


def place_of(argv: list[str]) -> tuple:
    """Return the teacher's place, and where that comes from, on this rank."""
    import torch.distributed as dist

    from mkd.config.load import load_config
    from mkd.operations.launch.rendezvous import Rendezvous
    from mkd.run.chosen_place import with_place

    rendezvous = Rendezvous(dist.get_rank(), dist.get_world_size())
    found = with_place(load_config(argv), rendezvous, 60)
    return found.config.teachers[0], found.origins["teachers[0].processes"]


def test_all_ranks_have_the_place_of_rank_0(files, ranks):
    argv = [*flags(files, "ranks"), *AUTO, *KNOWN]
    (first, origin), other = ranks.run(place_of, 2, argv)
    assert first.processes == 1 and origin == "--teacher-processes auto"
    assert other == (first, origin)
    ((alone, _),) = ranks.run(place_of, 1, argv)
    assert alone.processes == 0


@pytest.mark.slow
def test_a_run_on_the_split_of_its_plan(files, tmp_path):
    """The same bits as with a teacher beside the student."""
    first, other = start(tmp_path, [*flags(files, "auto"), *AUTO, *KNOWN])
    said = "--teacher-processes auto: 1 process (1 replica), "
    assert said in first and said not in other
    saved = yaml.safe_load((files / "auto" / "config.yaml").read_text())
    assert saved["teachers"][0]["processes"] == 1
    assert "on 1 process of its own" in (files / "auto" / "loss_card.txt").read_text()
    start(tmp_path, flags(files, "shared"), 1)
    assert losses(files / "auto") == losses(files / "shared")


@pytest.mark.slow
def test_a_resumed_run_keeps_its_split_while_it_can(files, tmp_path):
    """Another plan, here for a larger step, would choose another one; with more processes it has to."""
    own = flags(files, "kept", save=files / "kept", load=files / "kept")
    start(tmp_path, [*own, "--teacher-processes", "2", "--train-iters", "1"], 3)
    first, *_ = start(tmp_path, [*own, *AUTO, *KNOWN], 3)
    assert f"--teacher-processes auto: 2 processes, as in the checkpoint {files / 'kept'}" in first
    assert "changed since the checkpoint: --teacher-processes" not in first
    first, *_ = start(tmp_path, [*own, *AUTO, *KNOWN, "--train-iters", "3"], 4)
    assert "as in the checkpoint" not in first and "--teacher-processes auto: " in first


def test_an_unknown_memory_is_refused_once(files, ranks):
    (result,) = run_main(ranks, [*flags(files, "refused"), *AUTO])
    assert result.exit_code == 64
    assert reported_codes(result.stderr) == ["add-flag: the memory of a GPU is not known"]


def test_a_rank_that_cannot_come_to_the_choice_ends_the_others(files, tmp_path):
    places = [tmp_path / f"machine {rank}" for rank in range(2)]
    for place in places:
        place.mkdir()
    (places[0] / "run.yaml").write_text("training: {seed: 1}\n")
    argv = [*flags(files, "apart"), *AUTO, *KNOWN, "--config", "run.yaml"]
    first, second = run_processes(tmp_path, argv, 2, machines=places)
    assert first.code == second.code and first.code not in (0, -9) and first.after_s < 20
    assert "rank 1 cannot start" in first.output
