"""Steps on the text of whole runs, with teachers on processes of their own or beside the student."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool
from tests.train.invariance import worst_relative_error
from tests.train.sides_run import held_state, own_layout, serve, start_side, whole_states

TP2, PP2, CP2 = ((f"--{name}-parallel-size", "2") for name in ("tensor-model", "pipeline-model", "context"))
SP, DISTRIBUTED = ("--sequence-parallel",), ("--use-distributed-optimizer",)
VPP2 = (*PP2, "--num-virtual-stages-per-pipeline-rank", "2")


@dataclass(frozen=True)
class Sides:
    """Layouts of a student and of its teacher's own processes."""

    ranks: int  # of the student
    student: tuple[str, ...]
    teacher: tuple[str, ...]
    alike: tuple[str, ...] | None = None  # the teacher's layout as one that both share; None: not compared
    several: int = 0  # processes of all teachers, if their layouts are in a file

    @property
    def processes(self) -> int:
        """Processes of all teachers."""
        return self.several or int(self.teacher[1])


SIDES = {
    "TP1 from PP2": Sides(1, (), own_layout(2, pp=2), PP2),
    "TP2 + SP from CP2": Sides(2, (*TP2, *SP), own_layout(2, cp=2)),
    "TP2 + SP from 1": Sides(2, (*TP2, *SP), own_layout(1)),
    "PP2 from TP2": Sides(2, PP2, own_layout(2, tp=2), (*TP2, *SP)),
    "PP2 VPP2 from 1": Sides(2, VPP2, own_layout(1)),
    "DP2 from 1": Sides(2, DISTRIBUTED, own_layout(1)),
    "1 from 1": Sides(1, (), own_layout(1), ()),
    "1 from DP2": Sides(1, (), own_layout(2)),
    "CP2 from TP2": Sides(2, CP2, own_layout(2, tp=2)),  # a teacher beside TP2 has other packs
    "TP2 from CP2 PP2": Sides(2, TP2, own_layout(4, cp=2, pp=2)),
}


def step_of_sides(arguments: list[str], folder: Path, out_dir: Path) -> dict:
    """Return `step_of` of a student's process, or the forwards of a teacher's."""
    from mkd.operations.watchdog import Watchdog

    launch, plan, side = start_side(arguments, folder)
    if side.teacher is not None:
        Watchdog.idle(launch.rank, launch.size).meet_peers(launch)  # as `build_run` of the student does
        return {"forwards": serve(launch, plan, side).num_forwards}
    return step_of(plan, out_dir, launch)


def step_that_shares(arguments: list[str], out_dir: Path) -> dict:
    """Return `step_of` of a run whose teachers share the student's processes, and do not run ahead."""
    from mkd.config.load import load_config
    from mkd.run.plan_run import plan_run

    return step_of(plan_run(load_config(arguments).config, dist.get_world_size()), out_dir)


def step_of(plan, out_dir: Path, launch=None) -> dict:
    """Return what `steps_of` a run returns, and end it."""
    from mkd.operations.cleanup import Cleanup
    from mkd.operations.watchdog import Watchdog
    from mkd.platform import detect, make_deterministic
    from mkd.run.setup import build_run

    if plan.config.training.deterministic_mode:
        make_deterministic()
    watchdog = None if launch is None else Watchdog.idle(launch.rank, launch.size)
    with Cleanup() as cleanup:
        return steps_of(build_run(plan, detect(), launch=launch, watchdog=watchdog, cleanup=cleanup), out_dir)


def steps_of(run, out_dir: Path) -> dict:
    """Run a step, an evaluation of its text and another step, and export the gradients of the first.

    The evaluation comes while states of the second step are ahead, if its text is known: that of a run
    without completions. With completions the second step has those of the first.
    """
    from mkd.evaluation.evaluate import evaluate
    from mkd.train.step import train_step, training_objective
    from tests.train.invariance import export_student, gradients_as_parameters
    from tests.train.rollout_run import on_device

    stream, engine, states = run.data.train, run.engine, []
    batches = on_device(engine, stream.next_step())
    following = stream.following_step()

    def observe(given):
        states.append(held_state(engine.context, given))
        if run.meter is not None:
            run.meter(given)

    if run.meter is not None:
        run.meter.start()
    engine.optimizer.zero_grad()
    objective = training_objective(engine, batches, observe)
    sums = engine.schedule.run(engine.stages, batches, objective, forward_only=False, following=following)
    with gradients_as_parameters(engine, engine.context):
        export_student(engine, run.state, run.plan.student.assets, out_dir)
    figures = {} if run.meter is None else run.meter.finish()
    found = {
        "first": objective.sums(sums).token_sums(),
        "evaluation": evaluate(engine, [batches]).token_sums(),
    }
    result = train_step(engine, on_device(engine, following) or batches)
    found["second"] = {**result.sums.token_sums(), "grad_norm": result.grad_norm}
    left = [(len(one._asked), len(one._todo)) for one in engine.schedule.remote]
    figures.pop("rollout/time_ms", None)
    return {"sums": found, "figures": figures, "states": states, "left": left, "batches": len(batches)}


class Compared:
    """Runs of one kind: with a teacher on processes of its own they equal one process."""

    def __init__(
        self,
        pool: RankPool,
        files: Path,
        argv: Callable[..., list[str]],  # of the name of a run and flags
        # entered while a run of that name runs
        beside: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ):
        self.pool, self.files, self.argv, self.beside = pool, files, argv, beside
        self.files.mkdir(exist_ok=True)
        (self.single,) = self._shared("single", 1, ())

    def _shared(self, name: str, ranks: int, flags: Sequence[str]) -> list[dict]:
        arguments = self.argv(name, *flags, "--teacher-prefetch", "0")
        with self.beside(name):
            return self.pool.run(step_that_shares, ranks, arguments, self.files / f"{name} gradients")

    def check(self, folder: Path, sides: Sides) -> list[dict]:
        """Compare sums, figures, gradients and, where the layouts are alike, states. Return all results."""
        arguments = self.argv(folder.name, *sides.student, *sides.teacher)
        out = self.files / "layout gradients"
        ranks = sides.ranks + sides.processes
        with self.beside(folder.name):
            results = self.pool.run(step_of_sides, ranks, arguments, folder, out)
        students, teachers = results[: sides.ranks], results[sides.ranks :]
        assert all(one["forwards"] for one in teachers)
        require_equal_sums(students, self.single)
        error, where = worst_relative_error(out, self.files / "single gradients")
        assert error <= 1e-5, (where, error)
        assert all(one == (0, 0) for found in students for one in found["left"])
        if sides.alike is not None:
            of_shared = [self.single]
            if sides.alike:
                of_shared = self._shared(f"{folder.name} shared", 2, sides.alike)
            ours, theirs = (whole_states([one["states"] for one in found]) for found in (students, of_shared))
            assert ours.keys() == theirs.keys() and len(ours) > 1
            assert all(torch.equal(ours[ids], theirs[ids]) for ids in ours)
        return results


def require_equal_sums(students: Sequence[dict], single: dict) -> None:
    """Assert that the sums of all processes are those of one process.

    A sum of policy losses, which are of both signs, may be almost 0.
    """
    for part, expected in single["sums"].items():
        for found in students:
            assert found["sums"][part] == students[0]["sums"][part], "processes report different sums"
        for name, value in expected.items():
            assert students[0]["sums"][part][name] == pytest.approx(value, rel=1e-5, abs=1e-5), (part, name)
    for name, value in single["figures"].items():
        assert students[0]["figures"][name] == pytest.approx(value, abs=1e-5), name
