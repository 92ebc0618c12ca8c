"""A resumed run and a resumed export see that a model's image processor has changed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from mkd.config.load import load_config
from mkd.data.images.processors import PREPROCESSOR_FILE
from mkd.kinds.stored.topk_setup import TopKSetup
from mkd.plan.facts import RunFacts
from mkd.resolve.preflight import Tokenizers
from mkd.run.fingerprints import fingerprints
from mkd.run.plan_run import plan_run
from mkd.run.stored.cache_description import ExportSettings
from mkd.run.stored.cache_export import _describe, plan_export
from mkd.run.stored.topk_export import TopKExport
from tests.data.images.tiny_processors import make_qwen
from tests.reported import refused, reports
from tests.train.command import flags
from tests.train.two_processors import with_text, with_weights


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make a Qwen2.5-VL student with conversations, and a teacher with more tokens for an image."""
    folder = tmp_path_factory.mktemp("fingerprints")
    with_text(with_weights(make_qwen(folder / "student", most_pixels=16 * 16), seed=1))
    with_weights(make_qwen(folder / "teacher", most_pixels=32 * 32), seed=2)
    return folder


def change_mean(folder):
    """Change a setting that moves pixels and no token."""
    path = folder / PREPROCESSOR_FILE
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "image_mean": [one / 2 for one in settings["image_mean"]]}))


def test_the_processor_of_a_cross_tokenizer_teacher_counts(files):
    given = dict(data_path="student/chats.jsonl", image_root="student/pictures")
    argv = flags(files, "run", "--seq-length", 192, "--xtoken-loss", "partition_kl", **given)

    def found():
        plan = plan_run(load_config([str(word) for word in argv]).config, 1)
        return fingerprints(plan, plan.tokenizers.student, None)

    before = found()
    change_mean(files / "teacher")
    after = found()
    assert [name for name in before if before[name] != after[name]] == ["teacher.teacher.images"]


ALONE = SimpleNamespace(rank=0, broadcast_object=lambda one: one)
FIELDS = dict(teacher_hf="student", data_path="student/chats.jsonl", image_root="student/pictures")


def describe(files, *more):
    """Return (plan, description) of an export of the student's own predictions."""
    config = load_config([str(word) for word in flags(files, "export", *more, **FIELDS)]).config
    plan, kind = plan_export(config, 1), TopKExport(ExportSettings(files / "cache", 8), 4, "float32")
    return plan, _describe(plan, kind, {"train": 8}, ALONE)


def test_an_export_knows_the_processor_and_the_patches(files):
    pytest.importorskip("pyarrow")
    plan, meta = describe(files, "--max-patches-per-pack", 64)
    assert describe(files, "--max-patches-per-pack", 64)[1] == meta, "it can be resumed"
    with refused("teacher-cache-in-the-way: holds another teacher cache"):
        describe(files)
    problems = []
    argv = flags(files, "run", "--teacher-topk", files / "cache", **FIELDS | {"teacher_hf": None})
    facts = RunFacts(load_config([str(word) for word in argv]).config, 1)
    stored = TopKSetup.find(problems, facts, 0, None)
    assert reports(problems) == ["teacher-cache-differs: was made with"]
    assert "--max-patches-per-pack" in str(problems[0])
    change_mean(files / "student")
    with refused("teacher-cache-in-the-way: holds another teacher cache"):
        describe(files, "--max-patches-per-pack", 64)
    changed = plan_export(plan.config, 1)
    with refused("teacher-cache-differs: is of another image processor or"):
        tokenizers = Tokenizers(changed.tokenizer, (), None, (), changed.images)
        stored.attach(changed.config, tokenizers, ALONE, (None, None))
