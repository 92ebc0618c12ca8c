"""The divergences: names, parameters, formulas, flags and YAML keys.

Declare a new divergence here and implement it in `mkd/losses/divergences.py`. Help texts, range checks,
checks for parameters without effect, and the loss card all read the declarations below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mkd.config.field import option


@dataclass(frozen=True)
class Parameter:
    """A number that a divergence depends on: `jsd_beta` of a teacher, --kd-jsd-beta for all."""

    name: str
    default: float
    valid: str  # completes "must be ..."
    is_valid: Callable[[float], bool]
    help: str


@dataclass(frozen=True)
class Declaration:
    """The name of a divergence, its parameter and its formula."""

    name: str
    help: str  # completes "NAME ..." in the help of --kd-divergence
    formula: str  # of p_t and p_s; {x} is the parameter and {y} is 1 - x
    parameter: Parameter | None = None
    ends: tuple[tuple[float, str], ...] = ()  # (value of the parameter, the divergence that it then means)


JSD_BETA = Parameter(
    "jsd_beta",
    0.5,
    "from 0 to 1",
    lambda x: 0.0 <= x <= 1.0,
    "weight of the teacher in the mixture of jsd, 0 to 1. 0 means forward_kl and 1 means reverse_kl",
)
MIXED_KL_WEIGHT = Parameter(
    "mixed_kl_weight",
    0.5,
    "from 0 to 1",
    lambda x: 0.0 <= x <= 1.0,
    "weight of the forward KL in mixed_kl, 0 to 1; the reverse KL has the rest",
)
SKEW_ALPHA = Parameter(
    "skew_alpha",
    0.1,
    "from 0 to below 1",
    lambda x: 0.0 <= x < 1.0,
    "share of the KL's first model in the mixture that a skewed KL compares it with, from 0 to below 1. "
    "0 means the plain KL",
)

DECLARATIONS: Mapping[str, Declaration] = MappingProxyType(
    {
        declaration.name: declaration
        for declaration in (
            Declaration(
                "forward_kl",
                "is KL(teacher || student), which covers everything that the teacher predicts",
                "KL(p_t || p_s)",
            ),
            Declaration(
                "reverse_kl",
                "is KL(student || teacher), which concentrates on the teacher's most likely predictions",
                "KL(p_s || p_t)",
            ),
            Declaration(
                "mixed_kl",
                "is a weighted sum of both",
                "({x:g} KL(p_t || p_s) + {y:g} KL(p_s || p_t))",
                MIXED_KL_WEIGHT,
            ),
            Declaration(
                "jsd",
                "compares both models with their mixture",
                "({x:g} KL(p_t || m) + {y:g} KL(p_s || m)), m = {x:g} p_t + {y:g} p_s",
                JSD_BETA,
                # The formula itself vanishes at its ends; by convention they are the two KLs.
                ends=((0.0, "forward_kl"), (1.0, "reverse_kl")),
            ),
            # Source of both: DistiLLM, Ko et al. 2024 (arXiv 2402.03898), section 3.1.
            Declaration(
                "skewed_forward_kl",
                "is KL(teacher || mixture of both), with a gradient that stays bounded where the "
                "student is 0",
                "KL(p_t || m), m = {x:g} p_t + {y:g} p_s",
                SKEW_ALPHA,
                ends=((0.0, "forward_kl"),),
            ),
            Declaration(
                "skewed_reverse_kl",
                "is KL(student || mixture of both), which stays finite where the teacher is 0",
                "KL(p_s || m), m = {y:g} p_t + {x:g} p_s",
                SKEW_ALPHA,
                ends=((0.0, "reverse_kl"),),
            ),
        )
    }
)
DIVERGENCES = tuple(DECLARATIONS)
PARAMETERS = tuple(dict.fromkeys(one.parameter for one in DECLARATIONS.values() if one.parameter))


def _for_all(parameter: Parameter) -> Any:
    return option(parameter.default, parameter.help)


def _for_teacher(parameter: Parameter) -> Any:
    flag = f"--kd-{parameter.name.replace('_', '-')}"
    return option(None, f"{parameter.name} of this teacher (default: {flag})", flag=False)


@dataclass(frozen=True)
class KDDivergence:
    """The divergence of all teachers: part of the section `kd`."""

    kd_divergence: str = option(
        "forward_kl",
        "divergence to minimise. " + ". ".join(f"{one.name} {one.help}" for one in DECLARATIONS.values()),
        choices=DIVERGENCES,
    )
    kd_jsd_beta: float = _for_all(JSD_BETA)
    kd_mixed_kl_weight: float = _for_all(MIXED_KL_WEIGHT)
    kd_skew_alpha: float = _for_all(SKEW_ALPHA)


@dataclass(frozen=True)
class TeacherDivergence:
    """One teacher's divergence: part of its section. None means the value of `kd`."""

    divergence: str | None = option(
        None,
        "divergence to minimise for this teacher (default: --kd-divergence)",
        choices=DIVERGENCES,
        flag=False,
    )
    jsd_beta: float | None = _for_teacher(JSD_BETA)
    mixed_kl_weight: float | None = _for_teacher(MIXED_KL_WEIGHT)
    skew_alpha: float | None = _for_teacher(SKEW_ALPHA)


TEACHER_FIELDS = ("divergence", *(parameter.name for parameter in PARAMETERS))
"""The fields of `TeacherDivergence`; those of `KDDivergence` have the prefix `kd_`."""


@dataclass(frozen=True)
class DivergenceSettings:
    """A divergence and the value of its parameter, None if it has none."""

    name: str
    parameter: float | None = None

    @classmethod
    def from_config(cls, kd: KDDivergence, teacher: TeacherDivergence | None = None) -> DivergenceSettings:
        """Return the divergence for `teacher`: its own settings, else those of `kd`."""

        def first(name: str) -> object:
            own = getattr(teacher, name, None)
            return getattr(kd, f"kd_{name}") if own is None else own

        name = str(first("divergence"))
        parameter = DECLARATIONS[name].parameter
        value = None if parameter is None else float(first(parameter.name))  # type: ignore[arg-type]
        return cls(name, value)

    def resolved(self) -> DivergenceSettings:
        """Return the divergence that this one equals at an end of its parameter's range, else itself."""
        ends = dict(DECLARATIONS[self.name].ends)
        name = None if self.parameter is None else ends.get(self.parameter)
        return self if name is None else DivergenceSettings(name)

    def formula(self) -> str:
        """Return the formula with the parameter's value."""
        one = self.resolved()
        x = 0.0 if one.parameter is None else one.parameter
        return DECLARATIONS[one.name].formula.format(x=x, y=1 - x)
