"""Define the fixtures that every test folder shares."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
from collections import Counter
from pathlib import Path

# several ranks share few cores; set this before torch starts its threads
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

from mkd.errors import CheckpointError  # noqa: E402
from mkd.quickstart.fetch_smollm2 import fetch_smollm2  # noqa: E402
from tests.ranks import RankPool  # noqa: E402


@pytest.fixture(scope="session")
def ranks():
    """Yield the pool of gloo ranks, shared by the whole session."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """Return the folder of the real SmolLM2-135M-Instruct; its tests are marked `download`.

    It is fetched once, also for several workers of pytest-xdist, whose own folders are in one folder.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with open(folder / "smollm2.lock", "w", encoding="utf-8") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        try:
            return fetch_smollm2(folder / "smollm2")
        except CheckpointError as error:
            pytest.skip(error.what)


@pytest.fixture(scope="session")
def gpu_ranks():
    """Yield the pool of ranks with one GPU each."""
    pool = RankPool(on_gpus=True)
    yield pool
    pool.close()


def starts_processes(item: pytest.Function) -> bool:
    """Return True if a test uses a pool of ranks, or if its file starts processes."""
    starters = ("subprocess", "multiprocessing", "run_processes", "run_forked")
    return not {"ranks", "gpu_ranks"}.isdisjoint(item.fixturenames) or any(
        hasattr(item.module, name) for name in starters
    )


# Files of few tests that take long. Workers take whole files: what comes last is to be short.
LONG = {
    "recipe/test_distill.py",
    "test_launch.py",
    "train/test_prefetch_default.py",
    "train/test_recurrent_rollouts.py",
    "train/test_teacher_peers.py",
    "train/test_teacher_prefetch.py",
    "train/test_unlike_layers_resume.py",
    "train/test_vision_run.py",
}


def is_skipped(item: pytest.Item) -> bool:
    return item.get_closest_marker("skip") is not None


def sort_by_length(items: list[pytest.Item]) -> None:
    """Put long files first: those of LONG, then by their tests that start processes and are not skipped."""
    tests = Path(__file__).parent
    count = Counter(one.path for one in items if one.get_closest_marker("ranks") and not is_skipped(one))
    for path in count:
        if str(path.relative_to(tests)) in LONG:
            count[path] += len(items)
    items.sort(key=lambda item: -count[item.path])


@pytest.hookimpl(tryfirst=True)  # before `-m "not ranks"` selects
def pytest_collection_modifyitems(items):
    """Mark tests that start processes; skip `gpu` tests without a GPU, and `slow` ones unless MKD_SLOW=1."""
    for item in filter(starts_processes, items):
        item.add_marker(pytest.mark.ranks)
    if os.environ.get("MKD_SLOW") != "1":
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: set MKD_SLOW=1"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    sort_by_length(items)


@pytest.hookimpl(trylast=True)  # after the fixtures of the session, which may have processes
def pytest_sessionfinish(session):
    """Fail if a test has left a process behind: Python could wait for it for ever."""
    left = multiprocessing.active_children()
    for process in left:
        process.kill()
    if left:
        print(f"\nprocesses that tests have left behind: {left}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
