"""Fixtures that every test folder shares."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share few cores: before torch starts its threads

import pytest  # noqa: E402

from tests.ranks import RankPool  # noqa: E402


@pytest.fixture(scope="session")
def ranks():
    """The pool of gloo ranks, shared by the whole session."""
    pool = RankPool()
    yield pool
    pool.close()
