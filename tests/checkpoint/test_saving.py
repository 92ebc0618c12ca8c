"""Check that a stopped save leaves the pointer on a whole checkpoint, and that all ranks learn why."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import threading

import pytest
import torch

from mkd.checkpoint import hashed_file
from mkd.checkpoint.folders import (
    BY_STEPS,
    BY_TIME,
    CAUSE,
    LAST,
    POINTER,
    STOPPED,
    Retention,
    saved_iterations,
)
from tests.checkpoint.tiny_saves import (
    choose,
    copy,
    new_save,
    run_forked,
    save,
    sharded,
    small_disk,
    value_in,
)

POINTS = (
    "before_shard",
    "mid_shard",
    "after_shards",
    "before_manifest",
    "before_pointer",
    "mid_pointer",
    "after_pointer",
)


def test_layout_of_a_save(tmp_path):
    assert [code for code, _ in run_forked(2, save, tmp_path, 1, 2)] == [0, 0]
    assert (tmp_path / POINTER).read_text() == "2\n"
    names = {path.name for path in (tmp_path / "iter_0000002").iterdir()}
    shards = {f"__{rank}_{number}.distcp" for rank in (0, 1) for number in (0, 1)}
    assert names == shards | {".metadata", "metadata.json", "common.pt", "mkd.json", "manifest.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", "iter_0000002", POINTER}


def test_megatron_reads_it(tmp_path):
    """Megatron's own loader reads the files."""
    run_forked(2, save, tmp_path, 3)
    ((_, loaded), _) = run_forked(2, load_with_megatron, str(tmp_path / "iter_0000003"))
    assert loaded == (3.0, 3)


def load_with_megatron(context, folder):
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(sharded(context, 0), folder)
    assert loaded["rng"]["cpu"].equal(torch.get_rng_state())
    return loaded["w"][0, 0].item() - context.rank, loaded["step"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Return a folder with iteration 1, saved by two ranks."""
    folder = tmp_path_factory.mktemp("first")
    run_forked(2, save, folder, 1)
    return folder


def choose_save_choose(context, directory, iteration):
    """Return what the run after a killed one finds, and what the run after that finds."""
    found = choose(context, directory)
    save(context, directory, iteration)
    return found, choose(context, directory)


@pytest.mark.parametrize(
    "rank, point", [*((0, point) for point in POINTS), *((1, point) for point in POINTS[:3])]
)
@pytest.mark.fault(3)
def test_killed_at_any_point(rank, point, first, tmp_path):
    """Row 3: a kill leaves the old or the new checkpoint, and the next run saves over the rest."""
    folder = copy(first, tmp_path / "save")
    outcomes = run_forked(1 + rank, save, folder, 2, fault=f"kill@{point}:{rank}:2")
    assert outcomes[rank][0] == -signal.SIGKILL
    expected = 2 if point == "after_pointer" else 1
    ((_, (found, again)),) = run_forked(1, choose_save_choose, folder, 2)
    assert found == (f"iter_000000{expected}", expected, [])
    assert again == ("iter_0000002", 2, []) and not list(folder.glob("*.partial"))


@pytest.mark.parametrize("point", ["before_manifest", "before_pointer"])
@pytest.mark.fault(3)
def test_killed_while_an_iteration_is_saved_again(point, first, tmp_path):
    """A run that was rewound saves an iteration again: the old or the new one exists at any time."""
    folder = copy(first, tmp_path / "save")
    assert run_forked(1, save, folder, 1, fault=f"kill@{point}")[0][0] == -signal.SIGKILL
    assert run_forked(1, choose, folder) == [(0, ("iter_0000001", 1, []))]


@pytest.mark.parametrize(
    "kind, point, rank",
    [
        ("eio", "mid_shard", 1),
        ("enospc", "mid_shard", 1),
        ("error", "after_shards", 0),
        ("enospc", "before_manifest", 0),
        ("eio", "mid_pointer", 0),
    ],
)
@pytest.mark.fault(9)
def test_an_error_on_one_rank_is_raised_by_all(kind, point, rank, first, tmp_path):
    """Row 9: an error on one rank is raised by all."""
    tmp_path = copy(first, tmp_path / "save")
    outcomes = run_forked(2, save, tmp_path, 2, fault=f"{kind}@{point}:{rank}:2")
    (text,) = {text for _, (text, _) in outcomes}
    assert all(seconds < 10 for _, (_, seconds) in outcomes)
    assert text.startswith("error[save-disk-full]" if kind == "enospc" else "error[save-failed]")
    assert str(tmp_path) in text and (kind == "enospc" or f"(rank {rank})" in text)
    assert (tmp_path / POINTER).read_text() == "1\n" and not list(tmp_path.glob("*.partial"))
    assert value_in(tmp_path / "iter_0000001") == 1


@pytest.mark.fault(8)
def test_full_disk(tmp_path):
    """Row 8: a file system that really has no room for a second checkpoint."""
    with small_disk(tmp_path / "disk", "450k") as disk:
        if disk is None:
            pytest.skip("mounting a tmpfs is not allowed here")
        run_forked(2, save, disk, 1)
        outcomes = run_forked(2, save, disk, 2)
        assert all("[save-disk-full]" in text and seconds < 10 for _, (text, seconds) in outcomes)
        assert not list(disk.glob("*.partial"))
        ((_, (name, value, said)),) = run_forked(1, choose, disk)
        assert (name, value, said) == ("iter_0000001", 1, [])


def save_on_a_broken_disk(context, directory, *iterations):
    def broken(descriptor, block, place):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    # set in the process that saves, which then ends
    os.pwrite, hashed_file.BUFFER_BYTES = broken, hashed_file.ALIGNMENT
    return save(context, directory, *iterations)


@pytest.mark.fault(9)
def test_a_broken_disk_is_named(first, tmp_path):
    """Row 9: the disk's error is named even if torch.save replaces it with its own."""
    folder = copy(first, tmp_path / "save")
    for _, (text, _) in run_forked(2, save_on_a_broken_disk, folder, 2):
        assert text.startswith("error[save-failed]") and os.strerror(errno.EIO) in text
    assert (folder / POINTER).read_text() == "1\n" and not list(folder.glob("*.partial"))


def save_with_file_limit(context, directory, *iterations):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    return save(context, directory, *iterations)


@pytest.mark.fault(8)
def test_file_limit(tmp_path):
    """Row 8: a process's limit on its files, which needs no rights. The error does not ask to free space."""
    run_forked(1, save, tmp_path, 1)
    ((_, (text, _)),) = run_forked(1, save_with_file_limit, tmp_path, 2)
    assert text.startswith("error[save-disk-full]")
    assert (tmp_path / POINTER).read_text() == "1\n"
    assert [path.name for path in saved_iterations(tmp_path)] == ["iter_0000001"]


def save_in_background(context, directory):
    """Change all of the state right after the call, and again while it is written."""
    state = sharded(context, 7) | {"groups": [{"lr": 7.0}]}
    started = new_save(context, directory, 7).start(state, copied=True)
    state["w"].data.fill_(-1)
    state["groups"][0]["lr"] = -1.0
    thread = threading.Thread(target=started.write)
    thread.start()
    state["w"].data.fill_(-2)
    thread.join()
    folder = started.finish()
    return value_in(folder), torch.load(folder / "common.pt")["groups"], choose(context, directory)[0]


@pytest.mark.fault(10)
def test_background_save_has_the_values_of_its_step(tmp_path):
    """Row 10: a save in the background holds the values of its step."""
    assert run_forked(2, save_in_background, tmp_path) == [(0, (7, [{"lr": 7.0}], "iter_0000007"))] * 2


@pytest.mark.parametrize("fault, code", [("kill@mid_shard", -signal.SIGKILL), ("error@mid_shard", 0)])
@pytest.mark.fault(11)
def test_background_writer_that_dies(fault, code, first, tmp_path):
    """Row 11: the writing thread lives in the training process; it fails alone, or is killed with it."""
    folder = copy(first, tmp_path / "save")
    assert run_forked(1, save_in_background, folder, fault=fault)[0][0] == code
    assert (folder / POINTER).read_text() == "1\n" and run_forked(1, choose, folder)[0][1][:2] == (
        "iter_0000001",
        1,
    )
    assert run_forked(1, save_in_background, folder)[0][1][0] == 7


def save_with_retention(context, directory, newest, interval, *iterations):
    return save(context, directory, *iterations, retention=Retention(newest, interval))


@pytest.mark.parametrize(
    "newest, interval, kept",
    [
        (None, None, [6, 5, 4, 3, 2, 1]),
        (2, None, [6, 5]),
        (None, 3, [6, 3]),
        (2, 3, [6, 5, 3]),
        (1, 1, [6, 5, 4, 3, 2, 1]),
    ],
)
def test_retention(newest, interval, kept, tmp_path):
    run_forked(1, save_with_retention, tmp_path, newest, interval, *range(1, 7))
    assert [path.name for path in saved_iterations(tmp_path)] == [
        f"iter_{iteration:07d}" for iteration in kept
    ]


def save_with_causes(context, directory, newest, causes):
    """Save an iteration for each letter, which names the cause."""
    names = {"s": BY_STEPS, "t": BY_TIME, "p": STOPPED, "l": LAST}
    for iteration, letter in enumerate(causes, 1):
        one = new_save(context, directory, iteration, Retention(newest))
        one.contents.state[CAUSE] = names[letter]
        one.start(sharded(context, iteration), False).write().finish()


@pytest.mark.parametrize(
    "newest, causes, kept",
    [
        (None, "tttt", [4, 3]),
        (None, "ststpts", [7, 6, 3, 1]),  # of time and stops (p) only those among the newest two
        (None, "ltt", [3, 2, 1]),
        (3, "tttt", [4, 3, 2]),
        (1, "st", [2]),
    ],
)
def test_checkpoints_that_nobody_asked_for(newest, causes, kept, tmp_path):
    run_forked(1, save_with_causes, tmp_path, newest, causes)
    assert [int(path.name[-7:]) for path in saved_iterations(tmp_path)] == kept


@pytest.mark.fault(12)
def test_retention_counts_whole_checkpoints_only(tmp_path):
    """Row 12: damaged folders, older and newer, never push out the last whole checkpoint."""
    run_forked(1, save, tmp_path, 1, 2, 3, 8, 9)
    (tmp_path / "iter_0000003" / "common.pt").unlink()
    (tmp_path / "iter_0000008" / "manifest.json").write_text("{")
    shutil.rmtree(tmp_path / "iter_0000009")
    (tmp_path / "iter_0000009").mkdir()
    run_forked(1, save_with_retention, tmp_path, 2, None, 4)
    assert [path.name[-1] for path in saved_iterations(tmp_path)] == ["9", "8", "4", "3", "2"]
    shutil.rmtree(tmp_path / "iter_0000004")
    ((_, (name, value, _)),) = run_forked(1, choose, tmp_path)
    assert (name, value) == ("iter_0000002", 2)
