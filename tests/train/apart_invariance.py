"""Print the table of teachers on processes of their own: everything is as with one process for both models.

`make invariance` prints it after the other tables. The last column compares the final states that the student
gets, bit for bit, with those of a teacher that has the same layout and shares the student's processes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.ranks import RankPool
from tests.tiny_models import make_model
from tests.train.invariance import DISTRIBUTED, PARTS, SP, TOLERANCE, Layout, errors_of, make_pair, run_layout
from tests.train.moe_invariance import EP2, make_moe_pair
from tests.train.sides_run import own_layout, run_sides, shared_states, whole_states

COLUMNS = ("loss", "gradient", "evaluation", "grad norm", "updated")


@dataclass(frozen=True)
class Row:
    """A student's layout and the teachers' processes, and the first teacher's layout if it runs here."""

    student: Layout
    apart: tuple[str, ...]
    processes: int
    teacher: Layout | None  # None: its states are not compared


def row(student: Layout, teacher: Layout, more: tuple[str, ...] = ()) -> Row:
    """Return a row of one teacher."""
    apart = own_layout(teacher.ranks, tp=teacher.tp, pp=teacher.pp, cp=teacher.cp, more=more)
    return Row(student, apart, teacher.ranks, teacher)


ONE = Layout("s")
PP2, TP2, CP2, DP2, DP4 = (
    Layout("t", 2, pp=2),
    Layout("t", 2, tp=2, flags=SP),
    Layout("t", 2, cp=2),
    Layout("t", 2),
    Layout("t", 4),
)
LARGE = Layout("s", 8, tp=2, pp=2, flags=SP + DISTRIBUTED)
ROWS = {
    "TP1 <- PP2": row(ONE, PP2),
    "TP2 + SP <- CP2": row(Layout("s", 2, tp=2, flags=SP), CP2),
    "TP1 <- TP2": row(ONE, TP2),
    "TP1 <- CP2": row(ONE, CP2),
    "PP2 <- PP4": row(Layout("s", 2, pp=2), Layout("t", 4, pp=4)),
    "TP1 <- DP2": row(ONE, DP2),
    "TP2 <- PP2": row(Layout("s", 2, tp=2), PP2),
    "TP2 + SP <- TP2": row(Layout("s", 2, tp=2, flags=SP), TP2),
    "TP2 + SP <- PP2": row(Layout("s", 2, tp=2, flags=SP), PP2),
    "PP2 <- TP2": row(Layout("s", 2, pp=2), TP2),
    "PP2 VPP2 <- PP2": row(Layout("s", 2, pp=2, vp=2), PP2),
    "CP2 <- TP2": row(Layout("s", 2, cp=2), TP2),
    "CP2 <- CP2": row(Layout("s", 2, cp=2), CP2),
    "DP4 <- DP2": row(Layout("s", 4), DP2),
    "DP2, distributed optimizer <- DP4": row(Layout("s", 2, flags=DISTRIBUTED), DP4),
    "TP2 PP2 DP2 + SP, distributed <- TP2 CP2": row(LARGE, Layout("t", 4, tp=2, cp=2, flags=SP)),
}
EXPERTS_HERE = ("--teacher-expert-model-parallel-size", "2")
TP2_EP2 = Layout("t", 2, tp=2, flags=SP + EXPERTS_HERE)
EXPERT_ROWS = {
    "TP1 <- TP2 EP2": row(ONE, TP2_EP2, EXPERTS_HERE),
    "TP1 <- PP2": row(ONE, PP2),
    "EP2 <- CP2 EP2": row(Layout("s", 2, flags=EP2), Layout("t", 2, cp=2, flags=EXPERTS_HERE), EXPERTS_HERE),
    "EP2 <- TP4 EP4": row(
        Layout("s", 2, flags=EP2),
        Layout("t", 4, tp=4, flags=(*SP, "--teacher-expert-model-parallel-size", "4")),
        ("--teacher-expert-model-parallel-size", "4"),
    ),
}
SETTINGS = {
    "weighted_sum": (", weight: 2, temperature: 1.5", ", weight: 0.5"),
    "average": (", weight: 2", ", weight: 0.5"),  # one divergence has one temperature
}
PLACES = {  # of three teachers
    "PP2 <- beside it, PP2 and 1 process": (
        "",
        ", processes: 2, pipeline_model_parallel_size: 2",
        ", processes: 1",
    ),
    "PP2 <- PP2, beside it and 1 process": (
        ", processes: 2, pipeline_model_parallel_size: 2",
        "",
        ", processes: 1",
    ),
    "PP2 <- beside it, TP2 and CP2": (
        "",
        ", processes: 2, tensor_model_parallel_size: 2",
        ", processes: 2, context_parallel_size: 2",
    ),
}


def make_second(folder: Path) -> Path:
    """Make another teacher: narrower, of fewer layers, with the vocabulary of the first."""
    sizes = dict(num_hidden_layers=6, hidden_size=32, vocab_size=330)
    return make_model(folder / "second", "qwen3", seed=5, **sizes)


def several(folder: Path, first: Path, second: Path, combination: str, *places: str) -> tuple[str, ...]:
    """Return the flags of three teachers, the second of another size, with these places."""
    folder.mkdir(exist_ok=True)
    own = zip("abc", ("", *SETTINGS[combination]), places or ("", "", ""), strict=True)
    entries = [
        f"{{hf: {second if name == 'b' else first}, name: {name}{one}{place}}}" for name, one, place in own
    ]
    (folder / "run.yaml").write_text(f"teachers: [{', '.join(entries)}]\n")
    return "--config", str(folder / "run.yaml"), "--teacher-combination", combination


def compare(pool: RankPool, pair, one: Row, folder: Path, measures: Path, single: dict) -> tuple[dict, list]:
    """Return (errors against `single`, results of all processes). `measures` has its exports in `single`."""
    folder.mkdir(exist_ok=True)
    ranks = one.student.ranks + one.processes
    found = pool.run(run_sides, ranks, one.student, pair, one.apart, folder, measures / "layout")
    students = [result["measures"] for result in found[: one.student.ranks]]
    assert all(result["forwards"] for result in found[one.student.ranks :]), "a teacher's process was idle"
    return errors_of(students, measures, single), found


def same_states(pool: RankPool, pair, one: Row, found: list[dict]) -> bool:
    """Return True if the states are those of a teacher that shares the student's processes."""
    states = whole_states([result["states"] for result in found[: one.student.ranks]])
    of_shared = pool.run(shared_states, one.teacher.ranks, one.teacher, pair)
    expected = whole_states(of_shared)
    return states.keys() == expected.keys() and all(torch.equal(states[ids], expected[ids]) for ids in states)


def print_rows(title: str, make: Callable[[Path], tuple[Path, Path]], rows: dict[str, Row]) -> int:
    """Print a table, and return how many rows are not within the tolerance or have other states."""
    pool, failed = RankPool(), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pair = make(folder)
        (single,) = pool.run(run_layout, 1, Layout("one process"), *pair, folder / "single")
        _print_head(title)
        for number, (label, one) in enumerate(rows.items()):
            errors, found = compare(pool, pair, one, folder / f"launch {number}", folder, single)
            failed += _print_row(label, one, errors, same_states(pool, pair, one, found))
    pool.close()
    return failed


def print_several() -> int:
    """Print the table of three teachers, of which two have processes of their own."""
    pool, failed = RankPool(), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pair = make_pair(folder)
        second = make_second(folder)
        _print_head("three teachers, two of them on processes of their own")
        for combination in ("weighted_sum", "average"):
            models = pair[1], second, combination
            alone = Layout("one", flags=several(folder / "one", *models))
            (single,) = pool.run(run_layout, 1, alone, *pair, folder / "single")
            for number, (label, places) in enumerate(PLACES.items()):
                here = several(folder / f"sides {number}", *models, *places)
                processes = sum(int(one.split(", processes: ")[1][0]) for one in places if one)
                one = Row(Layout("s", 2, pp=2), here, processes, None)
                launch = folder / f"launch {combination} {number}"
                errors, _ = compare(pool, pair, one, launch, folder, single)
                failed += _print_row(f"{combination}: {label}", one, errors, None)
    pool.close()
    return failed


def _print_head(title: str) -> None:
    print(f"{title}: relative error to one process, fp32 (allowed {TOLERANCE:.0e})\n")
    print(f"{'student <- teacher':58}{'ranks':>6}" + "".join(f"{one:>12}" for one in COLUMNS) + "  states")


def _print_row(label: str, one: Row, errors: dict, is_same: bool | None) -> bool:
    """Print a row, and return True if it fails."""
    fails = is_same is False or any(errors[part] > TOLERANCE for part in PARTS)
    values = "".join(f"{errors[column]:12.1e}" for column in COLUMNS)
    states = {True: "bitwise", False: "OTHER", None: ""}[is_same]
    verdict = f"  FAILED {errors['where']}" if fails else ""
    print(f"{label:58}{one.student.ranks + one.processes:6}{values}  {states}{verdict}", flush=True)
    return fails


def main() -> int:
    failed = print_rows("a teacher on processes of its own", make_pair, ROWS)
    print()
    failed += print_rows("models with experts", make_moe_pair, EXPERT_ROWS)
    print()
    failed += print_several()
    print(f"\n{failed} rows failed" if failed else "\nall rows within the tolerance")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
