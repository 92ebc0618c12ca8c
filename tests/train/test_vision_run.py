"""Runs with images by the command: stop and resume, other layouts, exports, teachers of text."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from mkd.errors import DataError
from tests.checkpoint.saved_tensors import all_tensors
from tests.data.images.tiny_processors import image_file, make_qwen, picture
from tests.reported import reported_codes
from tests.tiny_models import make_model
from tests.train.command import call_main, flags, read_metrics, run_main, write_records
from tests.train.test_resume import train_and_hash
from tests.train.two_processors import with_text, with_weights

STEPS = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make a Qwen2.5-VL student with conversations, a teacher that sees images alike, and a finer one."""
    folder = tmp_path_factory.mktemp("vision_run")
    with_text(with_weights(make_qwen(folder / "student", most_pixels=16 * 16), seed=1))
    with_weights(make_qwen(folder / "teacher", most_pixels=16 * 16), seed=2)
    with_weights(make_qwen(folder / "finer", most_pixels=32 * 32), seed=3)
    return folder


def argv(files, run, *more, **paths):
    """Return the command line of `STEPS` steps of 4 packs; the corpus has more than 3 steps take."""
    given = dict(data_path="student/chats.jsonl", image_root="student/pictures", save=run) | paths
    words = flags(files, run, "--student-train-parts", "text", "projector", "tower", *more, **given)
    words[words.index("--seq-length") + 1] = "192"
    words[words.index("--train-iters") + 1] = str(STEPS)
    return [str(word) for word in words]


CROSS = ("--xtoken-loss", "partition_kl")
RUNS = {
    "one process": (1, (), "teacher"),
    "DP2, tower overlapped": (
        2,
        ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        "teacher",
    ),
    "TP2 + SP, a finer teacher": (
        2,
        ("--tensor-model-parallel-size", 2, "--sequence-parallel", *CROSS),
        "finer",
    ),
}


@pytest.mark.fault(1)
@pytest.mark.parametrize(
    "name", [name if "finer" in name else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_resume_is_bitwise_in_the_middle_of_an_epoch(name, files, ranks):
    world, layout, teacher = RUNS[name]

    def run(folder, *more):
        return ranks.run(train_and_hash, world, argv(files, folder, *layout, *more, teacher_hf=teacher))

    straight = run(f"whole {name}")
    run(f"halves {name}", "--exit-interval", STEPS // 2, "--num-workers", 1)
    assert run(f"halves {name}", "--load", files / f"halves {name}") == straight


@pytest.mark.slow  # test_vision_experts_run.py resumes at another layout, too
@pytest.mark.fault(23)
def test_saved_at_tp2_the_run_goes_on_at_pp2(files, ranks):
    """Weights are the same bitwise after loading, and training continues there."""
    tp2, pp2 = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)
    half = argv(files, "tp2", *tp2, "--exit-interval", STEPS // 2)
    ranks.run(train_and_hash, 2, half, files / "tp2 hf")
    stop_now = argv(files, "pp2", *pp2, "--load", files / "tp2", "--train-iters", STEPS // 2)
    ranks.run(train_and_hash, 2, stop_now, files / "pp2 hf")
    saved, loaded = all_tensors(files / "tp2 hf"), all_tensors(files / "pp2 hf")
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
    rest = run_main(ranks, argv(files, "rest", *pp2, "--load", files / "tp2"), 2)
    assert [one.exit_code for one in rest] == [0, 0], rest[0].stderr
    assert [record["iteration"] for record in read_metrics(files / "rest")] == [3, 4]


def test_a_frozen_tower_is_exported_byte_for_byte(files, ranks):
    more = ("--student-train-parts", "text", "projector", "--export-hf", files / "frozen hf")
    more += ("--max-image-side", 12)
    (done,) = run_main(ranks, argv(files, "frozen", *more))
    assert done.exit_code == 0, done.stderr
    before, after = all_tensors(files / "student"), all_tensors(files / "frozen hf")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    towers = {name for name in before if "visual" in name and "merger" not in name}
    assert towers and not towers & changed, "the tower is frozen"
    assert {name for name in before if "visual" not in name or "merger" in name} == changed
    _, report = transformers.AutoModelForImageTextToText.from_pretrained(
        files / "frozen hf", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    seen = transformers.AutoImageProcessor.from_pretrained(files / "frozen hf", backend="pil")
    assert seen.size["longest_edge"] == 12 * 12, "transformers reduces images as the student has seen them"
    saved = next((files / "frozen").glob("iter_*/hf/preprocessor_config.json"))
    assert saved.read_bytes() == (files / "frozen hf/preprocessor_config.json").read_bytes()


def test_an_image_that_changes_after_tokenising_ends_the_run(files, ranks, tmp_path):
    copied = with_text(with_weights(make_qwen(tmp_path / "student", most_pixels=16 * 16), seed=1))
    command = argv(tmp_path, "run", teacher_hf=None, student_hf=copied, data_path="student/chats.jsonl")
    command += ["--teacher-hf", str(files / "teacher")]
    (done,) = run_main(ranks, [*command, "--dry-run"])
    assert done.exit_code == 0, done.stderr
    (first,) = run_main(ranks, [*command, "--train-iters", "1"])
    assert first.exit_code == 0, first.stderr
    for number in range(5):
        (copied / "pictures" / f"{number}.png").write_bytes(image_file(picture(40, 40, seed=9)))
    command += ["--num-workers", "1"]  # the worker's error reaches the run
    (second,) = run_main(ranks, [*command, "--load", str(tmp_path / "run"), "--train-iters", "3"])
    assert second.exit_code == DataError.exit_code == 65
    assert "error[image-changed]" in second.stderr


@pytest.mark.parametrize("teacher", ["finer", pytest.param("teacher", marks=pytest.mark.slow)])
def test_losses_on_last_answers_about_pictures(teacher, files, ranks):
    """`--chat-loss last` equals flags that leave the earlier answers out, with both kinds of teachers."""
    records = [json.loads(line) for line in (files / "student/chats.jsonl").read_text().splitlines()]
    for record in records:
        record["messages"][1]["loss"] = False
    (files / "flagged.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    cross, two_rows = CROSS if teacher == "finer" else (), {}
    for name, more, data in (
        ("last", ("--chat-loss", "last", "--pipeline-model-parallel-size", 2), "student/chats.jsonl"),
        ("flags", (), "flagged.jsonl"),
    ):
        run = f"{name} {teacher}"
        command = argv(files, run, *cross, *more, "--train-iters", 2, teacher_hf=teacher, data_path=data)
        done = run_main(ranks, command, 2 if name == "last" else 1)
        assert {one.exit_code for one in done} == {0}, done[0].stderr
        two_rows[name] = [
            [record[key] for key in ("loss", "kd_loss", "grad_norm", "num_loss_tokens")]
            for record in read_metrics(files / run)
        ]
        assert ("(--chat-loss last)" in done[0].stdout + done[0].stderr) == (name == "last")
    for own, other in zip(*two_rows.values(), strict=True):
        assert own == pytest.approx(other, rel=1e-5) and own[-1] == other[-1] > 0


def make_text_teacher(files, name, texts) -> None:
    """Make a text model with the student's tokenizer, and a file of the conversations without images."""
    teacher = make_model(files / name, "qwen2", seed=4, vocab_size=400, num_hidden_layers=2)
    transformers.AutoTokenizer.from_pretrained(files / "student").save_pretrained(teacher)
    records = [json.loads(line) for line in (files / "student/chats.jsonl").read_text().splitlines()]
    of_text = [
        one for one in records if all(part["type"] == "text" for part in one["messages"][0]["content"])
    ]
    (files / texts).write_text("".join(json.dumps(one) + "\n" for one in of_text))


def test_a_teacher_of_text_teaches_on_text_alone(files, ranks):
    """A text model with the student's tokenizer: conversations without images train, others are refused."""
    make_text_teacher(files, "text teacher", "texts.jsonl")
    for cross in ((), CROSS):
        given = dict(teacher_hf="text teacher", image_root="student/pictures" if cross else None)
        run = f"text {len(cross)}"
        (refused,) = run_main(ranks, argv(files, run, *cross, **given))
        code = (
            "images-not-read: one of the models reads none"
            if cross
            else "images-not-read: nothing here can read them"
        )
        assert refused.exit_code == 65 and code in reported_codes(refused.stderr), refused.stderr
        export = () if cross else ("--export-hf", files / "of text")
        texts = given | dict(data_path="texts.jsonl")
        (done,) = run_main(ranks, argv(files, run, *cross, *export, **texts))
        assert done.exit_code == 0, done.stderr
        assert read_metrics(files / run)[-1]["iteration"] == STEPS
        assert "no training text has an image" in done.stdout + done.stderr
    before, after = all_tensors(files / "student"), all_tensors(files / "of text")
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {name for name in before if "visual" in name}, "weight decay moves the rest"


def save_text_alone(arguments):
    """Train as an mkd that ran the text model of a student with images alone."""
    from functools import partial

    from mkd.checkpoint import distributed

    whole = distributed._sharded_state
    distributed._sharded_state = partial(whole, no_tower=True)
    try:
        train_and_hash(arguments)
    finally:
        distributed._sharded_state = whole


def test_a_checkpoint_without_a_tower_resumes(files, ranks):
    """The tower keeps the weights of the student's folder; what has none for it is refused by name."""
    make_text_teacher(files, "teacher of text", "text alone.jsonl")

    def words(run, *more, **paths):
        given = dict(teacher_hf="teacher of text", data_path="text alone.jsonl", image_root=None) | paths
        return argv(files, run, "--student-train-parts", "text", *more, **given)

    (straight,) = ranks.run(train_and_hash, 1, words("never stopped"))
    ranks.run(save_text_alone, 1, words("no tower", "--exit-interval", STEPS // 2))
    (found,) = ranks.run(train_and_hash, 1, words("goes on", "--load", files / "no tower"))
    assert found == straight
    started = words("starts", "--student-load", files / "no tower", student_hf=None)
    (refused,) = run_main(ranks, started)
    assert reported_codes(refused.stderr) == ["checkpoint-of-another-model"]
    assert "--reference-hf" in refused.stderr
    out = files / "with the tower"
    export = ["--load", files / "no tower", "--hf-out", out, "--reference-hf", files / "student"]
    (exported,) = ranks.run(call_main, 1, [str(word) for word in export], "mkd.commands.export")
    assert exported[0] == 0, exported
    before, after = all_tensors(files / "student"), all_tensors(out)
    assert before.keys() == after.keys()
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {name for name in before if "visual" in name}


def test_simpo_learns_from_pairs_of_text_and_refuses_those_with_pictures(files, ranks):
    def pair(asked, i):
        said = [[{"role": "assistant", "content": f"{word} {i}"}] for word in ("fox", "the lazy dog")]
        return dict(prompt=[{"role": "user", "content": asked}], chosen=said[0], rejected=said[1])

    def run(name, *more):
        loss = ("--simpo-beta", 2, "--kd-ratio", 0, "--train-iters", 2)
        return argv(files, name, *loss, *more, teacher_hf=None, data_path="pairs.jsonl")

    write_records(files / "pairs.jsonl", *(pair(f"Which is {i}?", i) for i in range(24)))
    for name, processes, more in (("single", 1, ()), ("TP2", 2, ("--tensor-model-parallel-size", 2))):
        done = run_main(ranks, run(f"simpo {name}", *more), processes)
        assert {one.exit_code for one in done} == {0}, done[0].stderr
    one, two = (read_metrics(files / f"simpo {name}") for name in ("single", "TP2"))
    for key in ("loss", "simpo/margin", "grad_norm"):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], rel=1e-4)
    assert len(one) == 2 and one[0]["grad_norm"] > 0
    seen = [{"type": "image", "image": "0.png"}, {"type": "text", "text": "Which?"}]
    write_records(files / "pairs.jsonl", pair(seen, 0))
    (refused,) = run_main(ranks, run("simpo refused"))
    assert refused.exit_code == 65
    assert "images-not-read: mkd learns preferences from text only" in reported_codes(refused.stderr)


@pytest.mark.parametrize(
    "layout",
    [
        ("--tensor-model-parallel-size", 2, "--sequence-parallel"),
        pytest.param(("--pipeline-model-parallel-size", 2, "--micro-batch-size", 2), marks=pytest.mark.slow),
        pytest.param(("--context-parallel-size", 2), marks=pytest.mark.slow),
    ],
    ids=["TP2 + SP", "PP2", "CP2"],
)
def test_a_stored_teacher_teaches_as_the_teacher_that_runs(layout, files, ranks):
    """All ids of the vocabulary are stored, so that the losses are those of the teacher itself."""
    pytest.importorskip("pyarrow")
    name = layout[0].strip("-")
    short = ("--train-iters", 2, *layout)
    live = run_main(ranks, argv(files, f"live {name}", *short), 2)
    out = (
        "--out",
        files / f"topk {name}",
        "--k",
        400,
        "--logprob-dtype",
        "float32",
        "--samples-per-shard",
        7,
    )
    export = [str(word) for word in out] + argv(files, f"export {name}", *short)
    stored = run_main(ranks, export, 2, command="mkd.commands.topk")
    offline = argv(
        files, f"offline {name}", *short, "--teacher-topk", files / f"topk {name}", teacher_hf=None
    )
    trained = run_main(ranks, offline, 2)
    for results in (live, stored, trained):
        assert [one.exit_code for one in results] == [0, 0], results[0].stderr
    pairs = zip(read_metrics(files / f"offline {name}"), read_metrics(files / f"live {name}"), strict=True)
    for own, other in pairs:
        for metric in ("ce_loss", "kd_loss", "grad_norm"):
            assert own[metric] == pytest.approx(other[metric], rel=1e-5), metric


def without_network(argv: list[str]):
    """Run the command while every connection to another machine, and every look-up of a name, fails."""
    import socket
    from unittest.mock import patch

    from tests.train.command import call_main

    connect, tried = socket.socket.connect, []

    def local_only(self, address):
        if self.family != socket.AF_UNIX:
            tried.append(address)
            raise OSError("the network is forbidden")
        return connect(self, address)

    def no_name(*arguments, **_):
        tried.append(arguments)
        raise OSError("the network is forbidden")

    with patch("socket.socket.connect", local_only), patch("socket.getaddrinfo", no_name):
        return *call_main(argv), tried


def test_a_run_needs_no_network(files, ranks):
    """Tokenising, workers that decode, training, evaluation and the export open no connection."""
    more = ("--num-workers", 1, "--data-cache-path", files / "no network cache", "--train-iters", 2)
    more += ("--export-hf", files / "no network hf", "--split", "80,20,0", "--eval-interval", 2)
    ((code, _, stderr, tried),) = ranks.run(without_network, 1, argv(files, "no network", *more))
    assert (code, tried) == (0, []), stderr
    assert (files / "no network hf" / "config.json").is_file()
