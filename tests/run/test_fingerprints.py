"""Fingerprints of a run: what changes them, what does not, and how a difference is reported."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import save_file

from mkd.checkpoint.folders import TrainingPosition
from mkd.config.load import load_config
from mkd.config.schema import Config
from mkd.data.corpus.store import StoreFiles
from mkd.kinds.known_kinds import identity
from mkd.resolve.model_source import END_BYTES, ends_fingerprint
from mkd.run.fingerprints import SAMPLE_BYTES, SAMPLES, corpus_sample, require_same
from tests.reported import refused

SIZE = 4 * END_BYTES


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(SIZE))
    return path


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("place", "is_seen"),
    [(0, True), (END_BYTES - 1, True), (SIZE - END_BYTES, True), (SIZE - 1, True), (SIZE // 2, False)],
)
def test_both_ends_count(place, is_seen, file):
    before = ends_fingerprint([file])
    flip(file, place)
    assert (ends_fingerprint([file]) != before) == is_seen
    assert before.startswith("ends-sha256:")


def test_size_name_and_order_count(file, tmp_path):
    other = tmp_path / "other.bin"
    other.write_bytes(file.read_bytes())
    found = {
        ends_fingerprint(files) for files in ([file], [other], [file, other], [other, file], [file, file], [])
    }
    other.write_bytes(bytes(SIZE + 1))
    assert len(found | {ends_fingerprint([other])}) == 7


def test_all_of_a_safetensors_header_counts(tmp_path):
    """The header is longer than the part read of other files: names at its end must count too."""
    path = tmp_path / "model.safetensors"
    names = [f"{'x' * 200}{i:06d}" for i in range(8000)]
    prints = []
    for last in ("a", "b"):
        save_file({name: torch.zeros(1) for name in [*names, "z" * 200 + last]}, path)
        with open(path, "r+b") as file:  # data of the same bytes: only the header differs, far from both ends
            assert int.from_bytes(file.read(8), "little") > 2 * END_BYTES
            file.truncate(path.stat().st_size)
            file.seek(0, 2)
            file.write(bytes(2 * END_BYTES))
        prints.append(ends_fingerprint([path]))
    assert prints[0] != prints[1]


def test_an_absurd_header_length_is_harmless(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 8)
    assert ends_fingerprint([path]).startswith("ends-sha256:")
    path.write_bytes(b"")
    assert ends_fingerprint([path]).startswith("ends-sha256:")


SAVED = {
    "data.seed": 1,
    "data.files": "sha256:" + "a" * 64,
    "loss.kd_ratio": 0.5,
    "teacher.teacher": "ends-sha256:" + "b" * 64,
}


def test_differences_are_named(tmp_path):
    now = SAVED | {"data.files": "sha256:" + "c" * 64, "loss.kd_ratio": 0.3, "loss.new": "x"}
    del now["teacher.teacher"]
    with refused("run-differs") as caught:
        require_same(tmp_path, SAVED, now, [])
    text = str(caught.value)
    for part in (
        "data.files (sha256:aaaaaaaaaaaa then, sha256:cccccccccccc now)",
        "loss.kd_ratio (0.5 then, 0.3 now)",
        "loss.new (none then, x now)",
        "teacher.teacher (ends-sha256:bbbbbbbbbbbb then, none now)",
        "--accept-change data.files loss.kd_ratio loss.new teacher.teacher",
    ):
        assert part in text
    assert "data.seed" not in text


@pytest.mark.parametrize(
    ("accepted", "named"),
    [([], ["data.seed", "loss.kd_ratio"]), (["data"], ["loss.kd_ratio"]), (["data.seed", "loss"], [])],
)
def test_accepting_a_name_accepts_its_parts(accepted, named, tmp_path):
    now = SAVED | {"data.seed": 2, "loss.kd_ratio": 0.3}
    if not named:
        return require_same(tmp_path, SAVED, now, accepted)
    with refused("run-differs") as caught:
        require_same(tmp_path, SAVED, now, accepted)
    assert caught.value.do.endswith("--accept-change " + " ".join(named))


@pytest.mark.parametrize(
    "now",
    [
        {"student.lora_rank": 8, "student.lora_targets": ["proj", "qkv"]},
        {"student.lora_rank": 4, "student.lora_targets": ["qkv"]},
        {},
    ],
)
def test_other_adapters_are_never_accepted(now, tmp_path):
    """Those on proj would be left out without a word, and another rank was called a damaged checkpoint."""
    saved = SAVED | {"student.lora_rank": 4, "student.lora_targets": ["proj", "qkv"], "student.lora_alpha": 8}
    adapters = {"rank": 4, "alpha": 8, "targets": ["proj", "qkv"], "base": "models/the base"}
    state = asdict(TrainingPosition()) | {"adapters": adapters, "fingerprints": {"student.base": "hf-a"}}
    (tmp_path / "mkd.json").write_text(json.dumps(state))
    with refused("run-differs: other adapters") as caught:
        require_same(tmp_path, saved, SAVED | {"student.lora_alpha": 8} | now, ["student", "loss"])
    export = f"mkd export --load {tmp_path} --hf-out NEW --reference-hf 'models/the base'"
    assert f"{export}; then --student-hf NEW without --load" in caught.value.do
    assert "accept-change" not in caught.value.do
    require_same(tmp_path, saved, saved | {"student.lora_alpha": 3}, ["student.lora_alpha"])


def test_what_was_accepted_before_may_be_gone(tmp_path):
    """A scheduler starts the same command again, after the run that accepted the change has saved."""
    now = SAVED | {"teacher.other": "sha256:1"}
    del now["teacher.teacher"]
    names = ["teacher.other", "teacher.teacher"]
    require_same(tmp_path, SAVED, now, names)
    require_same(tmp_path, now, now, names, accepted_before=names)
    with refused("remove-flag: names nothing that is compared"):
        require_same(tmp_path, now, now, [*names, "teacher.third"], accepted_before=names)


@pytest.mark.parametrize("name", ["dat", "loss.kd", "bogus"])
def test_a_name_that_is_none_is_refused(name, tmp_path):
    with refused("remove-flag: names nothing that is compared"):
        require_same(tmp_path, SAVED, SAVED, [name])


def test_a_run_of_a_stored_teacher_that_did_not_say_its_data(tmp_path):
    """Earlier versions recorded no files and no k for a stored teacher.

    A run with its teacher in memory always recorded its files.
    """
    nothing = "sha256:" + hashlib.sha256(b"[]").hexdigest()
    require_same(tmp_path, SAVED | {"data.files": nothing}, SAVED | {"loss.stored_k": 16}, [])
    with refused("run-differs") as caught:
        require_same(tmp_path, SAVED, SAVED | {"loss.stored_k": 16}, [])
    assert caught.value.do.endswith("--accept-change loss.stored_k")


def test_same_and_unknown_pass(tmp_path):
    require_same(tmp_path, SAVED, json.loads(json.dumps(SAVED)), [])
    require_same(tmp_path, {}, SAVED, [])


@pytest.mark.parametrize("size", [1, SAMPLE_BYTES, SAMPLES * SAMPLE_BYTES, 3 * SAMPLES * SAMPLE_BYTES + 7])
def test_a_sample_of_a_corpus(size, tmp_path):
    """All of a small file counts, both ends of a large one, and a change of the index alone."""
    files = StoreFiles(str(tmp_path / "c"))
    files.bin.write_bytes(bytes(size))
    files.idx.write_bytes(b"index")
    found = [corpus_sample(files)]
    places = {0, size // 2, size - 1} if size <= SAMPLES * SAMPLE_BYTES else {0, SAMPLE_BYTES - 1, size - 1}
    for place in places:
        flip(files.bin, place)
        found.append(corpus_sample(files))
        flip(files.bin, place)
    files.idx.write_bytes(b"xedni")
    found.append(corpus_sample(files))
    assert len(set(map(tuple, found))) == len(places) + 2


def test_a_renamed_teacher_is_the_same(tmp_path):
    weights = {"teacher.a": "sha256:1", "teacher.b": "sha256:2"}
    require_same(tmp_path, SAVED | weights, SAVED | {"teacher.new": "sha256:1", "teacher.a": "sha256:2"}, [])
    for now in (
        {"teacher.a": "sha256:2", "teacher.b": "sha256:1"},
        {"teacher.new": "sha256:3", "teacher.b": "sha256:2"},
    ):
        with refused("run-differs"):
            require_same(tmp_path, SAVED | weights, SAVED | now, [])


def test_a_teacher_that_the_loss_did_not_read_is_not_compared(tmp_path):
    """Checkpoints of earlier versions have its settings."""
    plain = SAVED | {"loss.kd_ratio": 0.0}
    unread = {"loss.teachers[0].weight": 1.0, "loss.teachers[0].divergence": "jsd"}
    require_same(tmp_path, plain | unread, plain, [])
    for saved, now in ((SAVED | unread, SAVED), (plain | unread, SAVED)):
        with refused("run-differs"):
            require_same(tmp_path, saved, now, [])


def test_what_rewards_may_cost_is_not_the_loss(tmp_path):
    judged = load_config(["--reward", "r:f", "--reward-timeout-s", "30", "--max-failed-rewards", "3"]).config
    assert set(identity(judged)) == {"loss.reward"} and identity(Config()) == {}
    with refused("run-differs") as caught:
        require_same(tmp_path, SAVED, SAVED | {"loss.clip_range": 0.1}, [])
    assert "loss.clip_range (0.2 then, 0.1 now)" in caught.value.what


def test_settings_of_conversations_have_names(tmp_path):
    """A checkpoint of an earlier version lacks them: only its tokens are compared, as before."""
    now = SAVED | {"chat.loss": "last", "chat.template_kwargs": "{}"}
    require_same(tmp_path, SAVED, now, [])
    with refused("run-differs") as caught:
        require_same(tmp_path, now, now | {"chat.loss": "auto", "chat.template_kwargs": '{"a": 1}'}, [])
    assert "chat.loss (last then, auto now)" in caught.value.what
    assert 'chat.template_kwargs ({} then, {"a": 1} now)' in caught.value.what
    with refused("run-differs") as caught:
        require_same(tmp_path, SAVED, now | {"data.files": "sha256:" + "c" * 64}, [])
    assert caught.value.do.endswith("--accept-change data.files")


def test_an_option_that_was_not_there_yet_had_its_default(tmp_path):
    default, other = {"loss.kd_temperature": 1.0}, {"loss.kd_temperature": 2.0}
    of_teacher = {"loss.teachers[3].weight": 1.0, "data.content": "sha256:1"}
    require_same(tmp_path, SAVED, SAVED | default | of_teacher, [])
    for now in (other, {"loss.teachers[3].weight": 2.0}):
        (name,) = now
        with refused("run-differs") as caught:
            require_same(tmp_path, SAVED, SAVED | now, [])
        assert shlex.split(caught.value.do.rpartition("--accept-change ")[2]) == [name]
    with refused("run-differs"):
        require_same(tmp_path, SAVED | {"data.content": "sha256:2"}, SAVED | of_teacher, [])
