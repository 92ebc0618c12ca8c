"""Find the side of a run that waits for the other, if teachers have processes of their own."""

from __future__ import annotations

from statistics import median

from mkd.log.records import TRAIN
from mkd.release.training_record import PROCESSES
from mkd.report.run_folder import RunFolder

TOLERATED = 0.1
"""Share of a step that a side may wait before the report suggests something."""


def waiting_shares(run: RunFolder) -> tuple[float, float] | None:
    """Return (share of a step that the student waits, that its teachers do); None without such teachers.

    Both are medians over the training records but the first, which warms up.
    """
    if TRAIN not in run.splits:
        return None
    columns = run.splits[TRAIN]
    waits, steps, idle = (
        dict(columns.points(key)) for key in ("teacher_wait_ms", "step_time_ms", "teacher_idle_share")
    )
    places = sorted(waits.keys() & steps.keys() & idle.keys())
    places = places[1:] or places
    if not places:
        return None
    return median(waits[one] / steps[one] for one in places), median(idle[one] for one in places)


def sides_advice(run: RunFolder) -> str | None:
    """Return a sentence about the split of the processes; None for runs without teachers of their own."""
    shares = waiting_shares(run)
    if shares is None:
        return None
    student, teachers = shares
    found = f"the student waits {student:.0%} of a step, its teachers {teachers:.0%}"
    if max(shares) <= TOLERATED:
        return found
    if min(shares) > TOLERATED:
        return f"{found}: raise --teacher-ahead, so that neither waits for a row of the other"
    balanced = _balanced(run, student, teachers)
    if balanced is not None and balanced == _own_processes(run):
        return f"{found}: no other split of these processes is more even"
    how = "more" if student > teachers else "fewer"
    some = f", about {balanced} of all" if balanced else ""
    return f"{found}: give its teachers {how} processes{some}; mkd plan --device-memory-gib N compares splits"


def _balanced(run: RunFolder, student: float, teachers: float) -> int | None:
    """Return how many processes teachers need to be as fast as the student; None if that is not known."""
    size, own = run.plan.get(PROCESSES), _own_processes(run)
    if not isinstance(size, int) or not 0 < own < size:
        return None
    work = own * (1 - teachers), (size - own) * (1 - student)
    return min(max(round(size * work[0] / sum(work)), 1), size - 1)


def _own_processes(run: RunFolder) -> int:
    """Return how many processes teachers have for themselves; 0 if that is not known."""
    settings = [one for one in run.settings if one.path.startswith("teachers[")]
    values = [one.value for one in settings if one.path.endswith("].processes")]
    return sum(values) if all(isinstance(one, int) for one in values) else 0
