"""The shorthand for a student that is its own teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mkd.config.field import option
from mkd.config.models import EMA, FROZEN, INITIAL, LIVE, STAND_INS
from mkd.errors import UsageError

NAME, FIRST_TEACHER = "self_teacher", "teachers[0]"
BEGINNING = "initial"  # value of the option
_OF_TEACHER = tuple(f"{FIRST_TEACHER}.{name}" for name in ("hf", "load", *STAND_INS, "weights"))


@dataclass(frozen=True)
class SelfTeacherSettings:
    """The student as its own teacher."""

    self_teacher: str | None = option(
        None,
        "the student is its own, first teacher. initial: with the weights that it starts with, frozen. live: "
        "with those of every moment, after a context. ema: with their moving average. Short for a teacher's "
        "hf: student-initial, weights: live, and weights: ema",
        choices=(BEGINNING, LIVE, EMA),
    )


Values = Mapping[str, tuple[Any, str]]  # path -> (value, origin)


def with_self_teacher(*sources: Values) -> dict[str, tuple[Any, str]]:
    """Return the values of all sources, later ones first, with settings of a teacher for the shorthand.

    Raises UsageError if a source with the shorthand says what the first teacher is, too.
    """
    given: dict[str, tuple[Any, str]] = {}
    for source in sources:
        values = dict(source)
        chosen, origin = values.get(NAME, (None, ""))
        if chosen is not None:
            del values[NAME]
            _refuse_others(origin, chosen, values)
            given = {path: value for path, value in given.items() if path not in _OF_TEACHER}
            values[f"{FIRST_TEACHER}.weights"] = FROZEN if chosen == BEGINNING else chosen, origin
            if chosen == BEGINNING:
                values[f"{FIRST_TEACHER}.hf"] = INITIAL, origin
        given |= values
    return given


def _refuse_others(origin: str, chosen: str, values: Values) -> None:
    others = [values[path][1] for path in _OF_TEACHER if path in values]
    if others:
        what = f"self-teacher {chosen} ({origin}), but the first teacher is given ({others[0]})"
        do = "remove one of them, or write `hf: student-initial` or `weights:` of a teacher in a file"
        raise UsageError(what, "the student would be that teacher", do, code="exclude-each-other")
