"""Check that settings, places and precisions of teachers' layers name the same values and settings."""

from __future__ import annotations

from dataclasses import fields

import pytest

from mkd.config.models import TeacherConfig
from mkd.config.options import all_options
from mkd.kinds.placed.known_places import PLACES, PRECISIONS
from mkd.run.fingerprints import NOT_OF_TEACHER


@pytest.mark.parametrize("choices", [PLACES, PRECISIONS], ids=lambda one: one.setting)
def test_every_value_of_a_setting_is_a_class_and_every_other_setting_has_a_reader(choices):
    (option,) = (one for one in all_options() if one.path == f"teachers[0].{choices.setting}")
    assert {one.name for one in choices.known} == set(option.choices)
    assert choices.of(TeacherConfig()).name == option.default == choices.known[0].name
    others = {field.name for field in fields(choices.section)} - {choices.setting}
    assert others == {name for one in choices.known for name in one.reads()}


def test_a_run_resumes_with_another_place_but_not_with_another_precision():
    assert {field.name for field in fields(PLACES.section)} <= NOT_OF_TEACHER
    assert NOT_OF_TEACHER.isdisjoint(field.name for field in fields(PRECISIONS.section))
