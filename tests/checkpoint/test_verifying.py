"""Check that a run resumes from a whole checkpoint or not at all: damage is seen, named and passed over."""

from __future__ import annotations

import random
import shutil
import time

import pytest

from mkd.checkpoint.folders import POINTER, STATE_FILE
from mkd.checkpoint.manifest import MANIFEST_FILE
from mkd.checkpoint.verifying import choose_checkpoint
from tests.checkpoint.tiny_saves import choose, copy, run_forked, save

NEWEST, OLDER = "iter_0000002", "iter_0000001"
NUM_FLIPS = 200


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Return a folder with iterations 1 and 2, saved by two ranks."""
    folder = tmp_path_factory.mktemp("two")
    assert [code for code, _ in run_forked(2, save, folder, 1, 2)] == [0, 0]
    return folder


@pytest.fixture
def folder(two, tmp_path):
    """Return a private copy, to damage."""
    return copy(two, tmp_path / "save")


def chosen(folder, step=None, world_size=1):
    """Return `choose` on new ranks, by rank; (text, seconds) if it raises."""
    outcomes = run_forked(world_size, choose, folder, step)
    assert all(code == 0 for code, _ in outcomes)
    return [answer for _, answer in outcomes]


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"2", b"1x\n", b"-1\n", b"\xff\xfe\x00", b"\xd9\xa2\n", b"9\n", None]
)
@pytest.mark.fault(4)
def test_pointer_that_leads_nowhere(content, folder):
    """Row 4: damage to the pointer of iteration 2. `2` without its line break is still valid."""
    if content is None:
        (folder / POINTER).unlink()
    else:
        (folder / POINTER).write_bytes(content)
    ((name, value, said),) = chosen(folder)
    assert (name, value) == (NEWEST, 2)
    if content == b"2":
        assert said == []
    else:
        assert (POINTER if content != b"9\n" else "iter_0000009") in said[0]
        assert said[-1] == f"continuing from {folder / NEWEST}, and not from what the pointer names"


@pytest.mark.fault(4)
def test_no_checkpoint_is_whole(folder):
    """Row 4: every rank gets the same words, and nobody starts from scratch by accident."""
    for name in (NEWEST, OLDER):
        (folder / name / "common.pt").write_bytes(b"")
    (first, _), (second, _) = chosen(folder, world_size=2)
    assert first == second and first.startswith("error[checkpoint-none-whole]") and NEWEST in first


def test_a_chosen_step_is_taken_or_refused(folder):
    assert chosen(folder, 1) == [(OLDER, 1, [])]
    (folder / OLDER / "common.pt").unlink()
    ((text, _),) = chosen(folder, 1)
    assert text.startswith("error[checkpoint-damaged]") and str(folder / OLDER / "common.pt") in text
    ((text, _),) = chosen(folder, 7)
    assert text.startswith("error[checkpoint-not-found]") and f"{NEWEST}, {OLDER}" in text
    (folder / OLDER / "metadata.json").unlink()
    ((text, _),) = chosen(folder, 1)
    assert text.startswith("error[checkpoint-damaged]")


def test_empty_and_absent_folders_are_a_start(tmp_path):
    assert chosen(tmp_path) == chosen(tmp_path / "not there") == [(None, None, [])]


def damage_and_choose(context, directory, damages):
    """Return the choice after each (file, kind, place) of damage to the newest checkpoint; then repair it."""
    found = []
    for name, kind, place in damages:
        path = directory / NEWEST / name
        content = path.read_bytes()
        _damage(path, kind, place)
        said = []
        chosen = choose_checkpoint(directory, None, context, said.append)
        found.append((name, chosen.name, said[0] if said else ""))
        path.write_bytes(content)
    return found


def _damage(path, kind, place):
    content = bytearray(path.read_bytes())
    if kind == "delete":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(content[:place])
    else:
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)


def files_of(folder):
    return {path.name: path.stat().st_size for path in sorted((folder / NEWEST).iterdir())}


@pytest.mark.fault(5)
def test_any_flipped_bit_is_seen(folder):
    """Row 5: 200 random bits, ten or more in every file, the manifest included."""
    generator, files = random.Random(0), files_of(folder)
    names = [*(name for name in files for _ in range(10)), *generator.choices(list(files), k=NUM_FLIPS)][
        :NUM_FLIPS
    ]
    flips = [(name, "flip", generator.randrange(8 * files[name])) for name in names]
    ((_, found),) = run_forked(1, damage_and_choose, folder, flips)
    assert len(found) == NUM_FLIPS
    for name, went_on_from, said in found:
        assert went_on_from == OLDER and f"{folder / NEWEST / name} " in said


@pytest.mark.fault(6)
def test_files_that_are_cut_empty_or_gone_are_named(folder):
    """Row 6: files that are cut, empty or missing."""
    damages = [
        (name, *damage)
        for name, size in files_of(folder).items()
        for damage in (("cut", size // 2), ("cut", size - 1), ("cut", 0), ("delete", 0))
    ]
    ((_, found),) = run_forked(1, damage_and_choose, folder, damages)
    assert len(found) == len(damages)
    for name, went_on_from, said in found:
        assert went_on_from == OLDER and f"{folder / NEWEST / name} " in said


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", "common.pt", STATE_FILE])
@pytest.mark.fault(6)
def test_files_of_two_steps_are_not_mixed(name, folder):
    """Row 6: files of two steps, of the same size, are not mixed."""
    assert (folder / OLDER / name).stat().st_size == (folder / NEWEST / name).stat().st_size
    shutil.copyfile(folder / OLDER / name, folder / NEWEST / name)
    ((went_on_from, value, said),) = chosen(folder)
    assert (went_on_from, value) == (OLDER, 1) and f"{folder / NEWEST / name} has other contents" in said[0]


@pytest.mark.parametrize("name", [MANIFEST_FILE, "__0_0.distcp", "__1_0.distcp", "common.pt"])
@pytest.mark.fault(7)
def test_what_one_rank_reads_all_are_told(name, folder):
    """Row 7: rank 0 alone reads a manifest, and one of the ranks reads each other file."""
    path = folder / NEWEST / name
    path.write_bytes(path.read_bytes()[:-20])
    start = time.monotonic()
    (first, first_s), (second, second_s) = chosen(folder, 2, world_size=2)
    assert first == second and str(path) in first
    assert max(first_s, second_s) < 5 and time.monotonic() - start < 30


def test_without_a_manifest(folder):
    """A checkpoint without a manifest is accepted with a note, but never as a substitute."""
    (folder / NEWEST / MANIFEST_FILE).unlink()
    state = (folder / NEWEST / STATE_FILE).read_text().replace(',\n "manifest": "manifest.json"', "")
    (folder / NEWEST / STATE_FILE).write_text(state)
    ((name, _, said),) = chosen(folder)
    assert name == NEWEST and said == [
        f"{folder / NEWEST} has no manifest.json: its contents cannot be verified"
    ]
    (folder / NEWEST / STATE_FILE).unlink()
    assert chosen(folder)[0][0] == NEWEST
    (folder / POINTER).write_text("")
    assert chosen(folder)[0][0] == OLDER


def test_a_replaced_checkpoint_is_found(folder):
    """A kill between the two renames of a save of the same iteration loses nothing."""
    (folder / NEWEST).rename(folder / f"{NEWEST}.replaced")
    ((name, value, said),) = chosen(folder)
    assert (name, value) == (f"{NEWEST}.replaced", 2) and f"{folder / NEWEST} is missing" in said[0]
