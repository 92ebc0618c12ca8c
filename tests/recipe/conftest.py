"""Share two tiny models and their text."""

from __future__ import annotations

import pytest

from tests.train.command import make_files


@pytest.fixture(scope="package")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("recipe"))
