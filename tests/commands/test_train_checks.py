"""Check what `mkd train` refuses before it starts any process."""

from __future__ import annotations

import pytest

from mkd.commands.train import check
from mkd.errors import ErrorList
from tests.reported import reports
from tests.train.command import flags, make_files


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    files = make_files(tmp_path_factory.mktemp("files"))
    return [*flags(files, "checked"), "--global-batch-size", "8", "--micro-batch-size", "2"]


def test_the_batch_is_divided_over_the_processes_of_the_student(argv):
    check([*argv, "--teacher-processes", "3"], 5)
    with pytest.raises(ErrorList) as raised:
        check(argv, 5)
    assert "data-parallel 5" in str(raised.value)
    with pytest.raises(ErrorList) as raised:
        check([*argv, "--teacher-processes", "3"], 3)
    assert "the student, whose processes come first, would have none" in str(raised.value)


def test_an_open_split_that_no_plan_can_choose(argv):
    check([*argv, "--teacher-processes", "auto"], 2)
    with pytest.raises(ErrorList) as raised:
        check([*argv, "--teacher-processes", "auto", "--teacher-residency", "host"], 2)
    assert reports(raised.value) == ["exclude-each-other: it chooses the place"]
