"""Checkpoints of real runs: the ones they resume from or refuse, and a save in the background."""

from __future__ import annotations

import json
import os
import shutil
import socket

import pytest

from mkd.checkpoint.folders import POINTER, saved_iterations
from mkd.checkpoint.manifest import MANIFEST_FILE
from mkd.checkpoint.save_folder import LOCK_FILE, WriterLock
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import checkpoint_bytes
from mkd.run.fingerprints import describe_changes
from tests.checkpoint.tiny_saves import run_forked
from tests.reported import reported_codes
from tests.train.command import call_main, flags, make_files, poison, read_metrics, run_main, with_fault


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def saved(files, ranks):
    """Return the save folder of a run that saved both of its two steps."""
    argv = flags(files, "saved", "--save", files / "saved", "--save-interval", 1)
    assert [result.exit_code for result in run_main(ranks, argv)] == [0]
    return files / "saved"


@pytest.fixture
def folder(saved, files, tmp_path):
    """Make a private copy below the folder of `flags`."""
    return shutil.copytree(saved, files / tmp_path.name)


def go_on(ranks, files, folder, *more, world_size=1, **paths):
    """Do a third step of the run that is saved in `folder`."""
    argv = flags(files, folder.name, "--save", folder, "--load", folder, *more, **paths)
    return run_main(ranks, [*argv, "--train-iters", "3"], world_size)


@pytest.mark.fault(4, 5)
def test_a_damaged_checkpoint_is_passed_over(files, folder, ranks):
    """Rows 4 and 5 in a run: it reports the damage and repeats the lost step."""
    shard = folder / "iter_0000002" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    (result,) = go_on(ranks, files, folder)
    assert result.exit_code == 0, result.stderr
    assert f"{shard} has other contents than the manifest says" in result.stdout
    assert f"continuing from {folder / 'iter_0000001'}" in result.stdout
    assert [line["iteration"] for line in read_metrics(folder)] == [1, 2, 3]
    assert (folder / POINTER).read_text() == "3\n"


@pytest.mark.fault(4)
def test_nothing_whole_to_go_on_from(files, folder, ranks):
    """Row 4: every rank ends with 66, and rank 0 prints the reason."""
    for path in saved_iterations(folder):
        (path / "common.pt").unlink()
    first, second = go_on(ranks, files, folder, world_size=2)
    assert (first.exit_code, second.exit_code) == (66, 66)
    assert reported_codes(first.stderr) == ["checkpoint-none-whole"] and second.stderr == ""
    (result,) = go_on(ranks, files, folder, "--ckpt-step", 1)
    assert result.exit_code == 66 and reported_codes(result.stderr) == [
        "checkpoint-damaged: is not what was saved"
    ]


def test_manifest_and_expected_size(files, saved):
    """The disk space required in advance is that of weights and optimizer, except for some headers."""
    entries = json.loads((saved / "iter_0000002" / MANIFEST_FILE).read_text())["files"]
    assert {"common.pt", ".metadata", "mkd.json", "hf/config.json", "hf/tokenizer.json"} < entries.keys()
    tensors = sum(entry["size"] for name, entry in entries.items() if name.endswith(".distcp"))
    expected = checkpoint_bytes(ModelShape.from_hf_dir(files / "student"), False, ())
    assert expected < tensors < 1.5 * expected


CHANGES = {
    "loss": (("--kd-ratio", 0.25), "loss.kd_ratio"),
    "data.seed": (("--seed", 7), "data.seed"),
    "data.seq_length": (("--seq-length", 64), "data.seq_length"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_named_and_can_be_accepted(name, files, folder, ranks):
    more, setting = CHANGES[name]
    (result,) = go_on(ranks, files, folder, *more)
    assert result.exit_code == 66 and reported_codes(result.stderr) == ["run-differs"], result.stderr
    assert setting in result.stderr.rpartition("--accept-change ")[2].split()
    (result,) = go_on(ranks, files, folder, *more, "--accept-change", *name.split(" "), "data.files")
    assert result.exit_code == 0, result.stderr
    *_, before, after = read_metrics(folder)
    samples, tokens = (after[key] - before[key] for key in ("consumed_samples", "consumed_tokens"))
    assert before["consumed_tokens"] == 32 * before["consumed_samples"]
    assert tokens == samples * (64 if name == "data.seq_length" else 32)


def changes_said(result):
    assert result.exit_code == 0, result.stderr
    return [line for line in result.stdout.splitlines() if "changed since" in line]


def test_what_may_change_is_said(files, folder, ranks):
    """One rank prints each change once, with both values; the batch counts as a result, not as a flag."""
    argv = flags(files, folder.name, "--save", folder, "--load", folder)
    (result,) = run_main(ranks, argv)
    assert changes_said(result) == []
    at = argv.index("--global-batch-size")
    first, second = run_main(ranks, [*argv[:at], *argv[at + 2 :], "--lr", "0.0003", "--train-iters", "3"], 2)
    assert changes_said(second) == []
    assert changes_said(first) == [
        " changed since the checkpoint: --train-iters 2 -> 3, --global-batch-size 4 -> 2, "
        "--lr 0.001 -> 0.0003, "
        "data-parallel replicas 1 -> 2"
    ]


def test_what_an_older_checkpoint_does_not_say_is_not_compared():
    assert describe_changes({}, {"--lr": 1e-3}) == []
    assert describe_changes({"--lr": None}, {"--lr": 1e-3}) == [
        "changed since the checkpoint: --lr not given -> 0.001"
    ]


def other_text(files):
    text = (files / "text.jsonl").read_text()
    (files / "other.jsonl").write_text(text.replace("the quick", "eht kciuq"))
    return {"data_path": "other.jsonl"}


def other_teacher(files):
    return {"teacher_hf": poison(files / "teacher", files / "other teacher", 0.5).name}


def other_tokenizer(files):
    """Return paths of both models with two ids exchanged."""
    for model in ("student", "teacher"):
        folder = shutil.copytree(files / model, files / f"{model} exchanged")
        content = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary["p"], vocabulary["q"] = vocabulary["q"], vocabulary["p"]
        (folder / "tokenizer.json").write_text(json.dumps(content))
    return {"student_hf": "student exchanged", "teacher_hf": "teacher exchanged"}


@pytest.mark.parametrize(
    ("what", "make"),
    [("data.files", other_text), ("teacher.teacher", other_teacher), ("tokenizer", other_tokenizer)],
)
@pytest.mark.fault(28)
def test_other_contents_of_the_same_size_are_refused(what, make, files, folder, ranks):
    """Row 28: other contents of the same size are refused."""
    (result,) = go_on(ranks, files, folder, **make(files))
    assert result.exit_code == 66 and reported_codes(result.stderr) == ["run-differs"], result.stderr
    assert what in result.stderr.rpartition("--accept-change ")[2].split()


def student_with(files, **changes) -> str:
    """Return a copy of the student whose configuration has these changes."""
    folder = shutil.copytree(files / "student", files / f"student with {changes}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder.name


@pytest.mark.parametrize(
    "change", [{"tie_word_embeddings": False}, {"num_key_value_heads": 4}, {"rope_parameters": None}]
)
def test_weights_are_not_loaded_into_another_model(change, files, folder, ranks):
    """The weights would fit into some of these models, cut or not."""
    student = student_with(files, **change, rope_theta=5e5)
    (result,) = run_main(
        ranks, flags(files, "other", "--dry-run", "--student-load", folder, student_hf=student)
    )
    assert result.exit_code == 66 and reported_codes(result.stderr) == [
        "checkpoint-of-another-model: is a checkpoint of another model"
    ]


def test_a_run_does_not_go_on_with_another_model(files, folder, ranks):
    """The run is refused before the pointer moves."""
    (result,) = go_on(
        ranks, files, folder, "--ckpt-step", 1, student_hf=student_with(files, rms_norm_eps=0.05)
    )
    assert result.exit_code == 66 and "norm_epsilon 1e-06 instead of 0.05" in result.stderr
    assert (folder / POINTER).read_text() == "2\n"
    (result,) = go_on(ranks, files, folder, student_hf=student_with(files, max_position_embeddings=512))
    assert result.exit_code == 0, result.stderr


def test_a_teacher_in_another_folder_is_the_same(files, folder, ranks):
    shutil.copytree(files / "teacher", files / "moved teacher")
    (result,) = go_on(ranks, files, folder, teacher_hf="moved teacher")
    assert result.exit_code == 0, result.stderr


@pytest.mark.fault(28)
def test_a_corpus_without_description(files, ranks):
    """Row 28, for files of Megatron's own tools: other tokens of the same number."""
    cached = next((files / "cache").glob("text-*.bin"))
    for end in (".bin", ".idx"):
        shutil.copy(cached.with_suffix(end), files / f"plain{end}")
    argv = flags(files, "plain", "--save", files / "plain", data_path="plain")
    assert [result.exit_code for result in run_main(ranks, argv)] == [0]
    tokens = bytearray((files / "plain.bin").read_bytes())
    tokens[100:102] = tokens[200:202]
    assert bytes(tokens) != (files / "plain.bin").read_bytes()
    (files / "plain.bin").write_bytes(tokens)
    (result,) = go_on(ranks, files, files / "plain", data_path="plain")
    assert result.exit_code == 66
    assert "data.content" in result.stderr.rpartition("--accept-change ")[2].split(), result.stderr


def contents(folder):
    return {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE
    }


@pytest.mark.fault(33)
def test_the_second_run_in_a_folder_is_refused(files, folder, ranks):
    """Row 33: the second run leaves everything of the first as it is."""
    before = contents(folder)
    lock = WriterLock.take(folder)
    try:
        first, second = go_on(
            ranks, files, folder, "--kd-ratio", 0.1, "--accept-change", "loss", world_size=2
        )
    finally:
        lock.release()
    assert (first.exit_code, second.exit_code) == (66, 66) and second.stderr == ""
    assert f"process {os.getpid()} on {socket.gethostname()}" in first.stderr
    assert contents(folder) == before
    (result,) = go_on(ranks, files, folder)
    assert result.exit_code == 0, result.stderr


@pytest.mark.fault(33)
def test_two_runs_in_one_log_folder(files, ranks):
    """Row 33: the figures of both are kept."""
    argv = flags(files, "shared log")
    assert [result.exit_code for result in run_main(ranks, argv)] == [0]
    first = (files / "shared log" / "metrics.jsonl").read_bytes()
    (result,) = run_main(ranks, [*argv, "--train-iters", "1"])
    kept = files / "shared log" / "metrics.1.jsonl"
    assert result.exit_code == 0 and f"are now in {kept}" in result.stdout
    assert kept.read_bytes() == first and [
        line["iteration"] for line in read_metrics(files / "shared log")
    ] == [1]


@pytest.mark.fault(4, 5)
def test_a_run_that_has_gone_back_does_not_return(files, folder, ranks):
    """Rows 4 and 5: checkpoints after the step to which it rewound belong to another training."""
    more = ("--ckpt-step", 1, "--exit-interval", 1)
    # as a run of eight steps would leave
    left = shutil.copytree(folder / "iter_0000002", folder / "iter_0000008")
    (result,) = go_on(ranks, files, folder, *more)
    assert result.exit_code == 0 and (folder / POINTER).read_text() == "2\n", result.stderr
    (folder / "iter_0000002" / "common.pt").unlink()
    (result,) = go_on(ranks, files, folder)
    assert result.exit_code == 0 and f"continuing from {folder / 'iter_0000001'}" in result.stdout, (
        result.stderr
    )
    assert [line["iteration"] for line in read_metrics(folder)] == [1, 2, 3]
    assert not left.exists() and (folder / "iter_0000008.abandoned" / MANIFEST_FILE).exists()


@pytest.mark.fault(4, 5, 12)
def test_what_a_run_has_gone_back_from_is_never_its_own(files, folder, ranks):
    """This holds also after it has passed those steps and saved others.

    Abandoned checkpoints do not count for retention, and no run falls back on them.
    """
    left = shutil.copytree(folder / "iter_0000002", folder / "iter_0000004")
    former = folder / f"{left.name}.abandoned"  # left by an earlier run that was rewound
    former.mkdir()
    more = ("--ckpt-step", 1, "--save-interval", 3, "--keep-checkpoints", 2)
    argv = flags(files, folder.name, "--save", folder, "--load", folder, *more)
    (result,) = run_main(ranks, [*argv, "--train-iters", "5"])
    assert result.exit_code == 0, result.stderr
    assert "this run abandons iter_0000004, iter_0000002: " in result.stdout
    assert [path.name for path in saved_iterations(folder)] == ["iter_0000005", "iter_0000003"]
    assert {path.name for path in folder.glob("*.abandoned")} == {"iter_0000002.abandoned", former.name}
    # a user may still load it
    (result,) = run_main(ranks, flags(files, "to it", "--load", former, "--train-iters", 3))
    assert result.exit_code == 0 and [line["iteration"] for line in read_metrics(files / "to it")] == [3], (
        result.stderr
    )


def test_going_back_moves_the_pointer_at_once(files, folder, ranks):
    """The pointer moves before the later records are removed: a crash in between must not return to them."""
    argv = flags(files, folder.name, "--save", folder, "--load", folder, "--ckpt-step", 1)
    ((exit_code, *_),) = ranks.run(with_fault, 1, argv, "error@in_data:0:2")
    assert exit_code == 1 and (folder / POINTER).read_text() == "1\n"


def test_fewer_steps_than_are_done(files, folder, ranks):
    argv = flags(files, folder.name, "--save", folder, "--load", folder)
    (folder / "DONE").unlink()
    (result,) = run_main(ranks, [*argv, "--train-iters", "1"])
    assert result.exit_code == 0 and "2 iterations are done, and --train-iters asks for 1" in result.stdout, (
        result.stderr
    )
    assert json.loads((folder / "DONE").read_text())["iteration"] == 2


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.fault(10)
def test_a_background_save_is_the_same_files(world_size, files, ranks):
    """Row 10 in a run: training continues during a save, and no byte of any checkpoint differs."""
    manifests = {}
    for more in ((), ("--async-save",)):
        folder = files / f"background {world_size} {len(more)}"
        argv = flags(files, folder.name, "--save", folder, "--save-interval", 1, *more)
        results = run_main(ranks, [*argv, "--train-iters", "4"], world_size)
        assert [result.exit_code for result in results] == [0] * world_size, results[0].stderr
        assert all(f"saved checkpoint {path}" in results[0].stdout for path in saved_iterations(folder))
        manifests[more] = [
            (path.name, (path / MANIFEST_FILE).read_text()) for path in saved_iterations(folder)
        ]
    first, second = manifests.values()
    assert first == second and len(first) == 4


@pytest.mark.fault(12)
def test_retention_in_a_run(files, ranks):
    folder = files / "retention"
    argv = flags(files, "retention", "--save", folder, "--save-interval", 1, "--keep-checkpoints", 1)
    (result,) = run_main(ranks, [*argv, "--save-retain-interval", "2", "--train-iters", "5"])
    assert result.exit_code == 0, result.stderr
    assert [path.name[-1] for path in saved_iterations(folder)] == ["5", "4", "2"]


def start_as_nobody(context, argv):
    """Return what the command says to a user without rights; root may write to any folder."""
    import mkd.run.setup  # noqa: F401  while the packages can be read

    if os.geteuid() == 0:
        os.setuid(65534)
    return call_main(argv)


@pytest.mark.fault(33)
def test_read_only_save_folder(files):
    """Row 33: the error comes before anything is read or trained, also for a folder yet to be made."""
    locked = files / "locked"
    locked.mkdir(mode=0o555)
    for path in (*files.rglob("*"), files, *list(files.parents)[:3]):
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))  # safetensors are private
    for save in (locked, locked / "deeper" / "still"):
        ((_, (exit_code, _, stderr)),) = run_forked(
            1, start_as_nobody, flags(files, "locked run", "--save", save)
        )
        assert exit_code in (64, 66) and "cannot write to" in stderr and str(locked) in stderr, stderr
        assert "read-only for this user" in stderr
    assert not list(locked.iterdir())
