"""Check that divergences agree with flags and keys, and that a teacher's settings override common ones."""

from __future__ import annotations

from dataclasses import fields

import pytest

from mkd.config.divergence import (
    DECLARATIONS,
    PARAMETERS,
    TEACHER_FIELDS,
    DivergenceSettings,
    KDDivergence,
    TeacherDivergence,
)
from mkd.config.schema import KDConfig, TeacherConfig


def test_every_parameter_has_a_flag_and_a_key():
    of_kd, of_teacher = (
        {field.name: field for field in fields(cls)} for cls in (KDDivergence, TeacherDivergence)
    )
    assert of_teacher.keys() == set(TEACHER_FIELDS)
    assert of_kd.keys() == {f"kd_{name}" for name in TEACHER_FIELDS}
    for parameter in PARAMETERS:
        field = of_kd[f"kd_{parameter.name}"]
        assert (field.default, field.metadata["help"]) == (parameter.default, parameter.help)
        assert parameter.is_valid(parameter.default) and not parameter.is_valid(float("nan"))


def test_ends_are_other_divergences_without_a_parameter():
    for one in DECLARATIONS.values():
        assert one.parameter is not None or not one.ends
        for value, name in one.ends:
            assert one.parameter.is_valid(value) and DECLARATIONS[name].parameter is None
            assert DivergenceSettings(one.name, value).resolved() == DivergenceSettings(name)
            assert DivergenceSettings(one.name, value).formula() == DivergenceSettings(name).formula()
        inside = DivergenceSettings(one.name, None if one.parameter is None else 0.25)
        assert inside.resolved() == inside


@pytest.mark.parametrize(
    ("teacher", "wanted"),
    [
        (None, DivergenceSettings("jsd", 0.3)),
        (TeacherConfig(), DivergenceSettings("jsd", 0.3)),
        (TeacherConfig(jsd_beta=0.1), DivergenceSettings("jsd", 0.1)),
        (TeacherConfig(jsd_beta=0.0), DivergenceSettings("jsd", 0.0)),
        (TeacherConfig(divergence="reverse_kl"), DivergenceSettings("reverse_kl")),
        (TeacherConfig(divergence="mixed_kl"), DivergenceSettings("mixed_kl", 0.5)),
        (
            TeacherConfig(divergence="skewed_reverse_kl", skew_alpha=0.2),
            DivergenceSettings("skewed_reverse_kl", 0.2),
        ),
    ],
)  # fmt: skip
def test_a_teacher_overrides_the_common_settings(teacher, wanted):
    assert DivergenceSettings.from_config(KDConfig(kd_divergence="jsd", kd_jsd_beta=0.3), teacher) == wanted
