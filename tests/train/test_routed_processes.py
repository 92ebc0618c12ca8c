"""Teachers by tag on processes of their own: the bits of a run in which all teachers share the student's."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.train.dense_teachers import make_files
from tests.train.invariance import SP, Layout
from tests.train.routed_layouts import ONE_EACH, run_layout, run_sides, write_config

PASSES = 4  # over the packs: gradients, an evaluation and two updates
SPLIT = ({"tags": ["code"]}, {"tags": ["law", "math"]})  # on 2 replicas the first is needed beside the second
PEERS = {"residency": "peers", "peers": 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("routed-sides"))


def settings(first: dict, second: dict, tags=ONE_EACH) -> tuple[dict, dict]:
    return first | tags[0], second | tags[1]


def check(ranks, files, tmp_path, student: Layout, sides, shared, is_bitwise: bool):
    """Compare a routed run on sides with the same one in which all run, and with the teachers `shared`."""
    processes, found = sum(one.get("processes", 0) for one in sides), {}
    for runs_all in (True, False):
        folder = tmp_path / str(runs_all)
        folder.mkdir()
        given = student, write_config(files, *sides), runs_all, folder, folder / "out"
        every = ranks.run(run_sides, student.ranks + processes, *given)
        found[runs_all] = every, load_file(folder / "out" / "gradients" / "model.safetensors")
    given = Layout("shared", student.ranks), write_config(files, *shared), False, tmp_path / "shared"
    reference = ranks.run(run_layout, student.ranks, *given)
    expected = load_file(tmp_path / "shared" / "gradients" / "model.safetensors")
    (whole, of_all), (routed, of_routed) = found[True], found[False]
    for name, gradient in of_routed.items():
        assert torch.equal(gradient, of_all[name]), name
        assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name
        assert not is_bitwise or torch.equal(gradient, expected[name]), name
    for key in ("sums", "held_out", "step", "grad_norm"):
        assert routed[0][key] == whole[0][key], key
        assert not is_bitwise or routed[0][key] == reference[0][key], key
    assert routed[0]["sums"]["loss"] == pytest.approx(reference[0]["sums"]["loss"], rel=1e-5)
    return [one["forwards"] for one in routed[student.ranks :]], reference


def test_two_teachers_with_processes(ranks, files, tmp_path):
    """Each is asked for the rows of its tags alone."""
    sides = settings({"processes": 2, "pipeline_model_parallel_size": 2}, {"processes": 1})
    forwards, _ = check(ranks, files, tmp_path, Layout("s"), sides, ONE_EACH, is_bitwise=True)
    assert forwards == [4 * PASSES] * 3


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["behind", "in front"])
def test_beside_a_teacher_whose_peers_run_in_step(ranks, files, tmp_path, first):
    """Replicas run the shared teacher together; each asks the other one for its own rows."""
    own, needed = ({"processes": 1}, 5) if first else (PEERS, 3)
    sides = settings(PEERS if first else {"processes": 1}, own, SPLIT)
    shared = settings(PEERS, PEERS, SPLIT)
    forwards, _ = check(ranks, files, tmp_path, Layout("s", 2), sides, shared, is_bitwise=True)
    assert forwards == [needed * PASSES]


@pytest.mark.slow
@pytest.mark.parametrize(
    "student",
    [
        Layout("s", 2, tp=2),
        Layout("s", 2, tp=2, flags=SP),
        Layout("s", 2, cp=2),
        Layout("s", 2, pp=2, vp=2),
        Layout("s", 2),
    ],
    ids=("TP2", "TP2 + SP", "CP2", "PP2 VPP2", "DP2"),
)
def test_layouts_of_the_student(ranks, files, tmp_path, student):
    sides = settings({"processes": 2, "tensor_model_parallel_size": 2}, {"processes": 1})
    forwards, _ = check(ranks, files, tmp_path, student, sides, ONE_EACH, is_bitwise=False)
    assert forwards == [4 * PASSES] * 3
