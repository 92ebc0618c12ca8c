"""Settings of a run for conversations: the date of its first start, what is said, flags without effect."""

from __future__ import annotations

import datetime
import json
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from mkd.checkpoint.folders import MEGATRON_FILE, POINTER, STATE_FILE
from mkd.commands.inspect import build_parser as inspect_parser
from mkd.commands.inspect import show_packs
from mkd.commands.preprocess import main as preprocess
from mkd.config.load import load_config
from mkd.errors import EXIT_CHECKPOINT, EXIT_USAGE, ErrorList
from mkd.resolve import chat_setup
from mkd.resolve.chat_setup import chat_settings, describe_chat
from mkd.run.fingerprints import _chat as fingerprints_of_chats
from mkd.run.fingerprints import fingerprints
from mkd.run.plan_run import plan_run
from mkd.run.stored.cache_description import ExportSettings, write_description
from mkd.run.stored.cache_export import plan_export
from mkd.run.stored.topk_export import TopKExport
from mkd.tokenizers import chat_input
from tests.reported import refused, reports
from tests.train.command import Result, call_main, flags, make_files, read_metrics, run_main, write_records

TEMPLATE = (
    "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}"
    "{{ m['role'] + ': ' + m['content'] + '<|endoftext|>' }}{% endfor %}"
)
UNDATED = TEMPLATE.removeprefix("{{ strftime_now('%Y-%m-%d') }}")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = make_files(tmp_path_factory.mktemp("chat"))
    (folder / "student" / "chat_template.jinja").write_text(TEMPLATE)
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "fox"}]
    write_records(folder / "chat.jsonl", *[{"messages": said}] * 20)
    return folder


def on_day(day, argv, command="mkd.run.main"):
    """Run the command on that day."""
    today = mock.Mock(wraps=datetime.date, **{"today.return_value": datetime.date.fromisoformat(day)})
    with mock.patch.object(chat_input, "Date", today):
        return call_main(argv, command)


def on_day_of_rank(days, argv):
    """Run the command on every rank's own day."""
    return on_day(*days[dist.get_rank()], argv)


def problems_of(argv) -> list:
    try:
        plan_run(load_config(argv).config, 1)
    except ErrorList as error:
        return error.errors
    return []


def test_a_run_that_resumes_keeps_the_date_of_its_first_start(files, ranks):
    def start(day, log, *more):
        argv = flags(files, log, *more, data_path="chat.jsonl", data_cache_path=f"{log} cache", save="saved")
        return Result(*ranks.run(on_day, 1, day, argv)[0])

    first = start("2026-11-26", "first", "--exit-interval", 1)
    assert first.exit_code == 0, first.stderr
    assert "writes a date. The whole run writes 2026-11-26" in first.stdout + first.stderr
    assert "every turn of the assistant, because the chat template marks none" in first.stdout + first.stderr
    changed = start("2026-11-27", "changed", "--load", files / "saved", "--chat-date", "2026-11-27")
    assert changed.exit_code == EXIT_CHECKPOINT, changed.stderr
    assert "chat.date (2026-11-26 then, 2026-11-27 now)" in changed.stderr
    for flag, value, name in (
        ("--chat-loss", "last", "chat.loss (auto then, last now)"),
        ("--chat-template-kwargs", '{"mood": "x"}', 'chat.template_kwargs ({} then, {"mood": "x"} now)'),
    ):
        changed = start("2026-11-27", "changed", "--load", files / "saved", flag, value)
        assert changed.exit_code == EXIT_CHECKPOINT and f"with other {name}, data.files" in changed.stderr
    second = start("2026-11-27", "second", "--load", files / "saved")
    assert second.exit_code == 0, second.stderr
    assert "writes a date. The whole run writes 2026-11-26" in second.stdout + second.stderr


def test_settings_of_conversations_count_where_the_run_makes_tokens(files):
    """A tokenised corpus, or prompts alone, do not depend on all of them."""
    more = ("--chat-loss", "last", "--chat-template-kwargs", '{"b": 1, "a": 2}')
    plan = plan_run(load_config(flags(files, "named", *more, data_path="chat.jsonl")).config, 1)

    def named(cache_key, prompts=None):
        store = SimpleNamespace(meta={"cache_key": cache_key})
        found = fingerprints_of_chats(plan, plan.tokenizers.student, [store], prompts)
        return found.pop("chat.date") and found

    variables = {"chat.template_kwargs": '{"a": 2, "b": 1}'}
    assert named("key") == {"chat.loss": "last"} | variables
    assert named(None) == {} and named(None, prompts=object()) == variables


def test_a_run_keeps_the_date_that_only_a_teacher_writes(files):
    """Its checkpoints have the date, and its start says it."""
    for name, template in (("undated", UNDATED), ("dated", TEMPLATE)):
        shutil.copytree(files / "student", files / name)
        (files / name / "chat_template.jinja").write_text(template)
    more = ("--xtoken-loss", "partition_kl", "--chat-date", "2026-11-26")
    paths = dict(student_hf="undated", teacher_hf="dated", data_path="chat.jsonl")
    plan = plan_run(load_config(list(map(str, flags(files, "teacher's", *more, **paths)))).config, 1)
    assert fingerprints(plan, plan.tokenizers.student, None)["chat.date"] == "2026-11-26"
    chats = SimpleNamespace(prompts=[SimpleNamespace(is_chat=True)])
    assert "2026-11-26" in describe_chat(plan.tokenizers.opened, [], chats)[-1]


def test_several_teachers_of_a_dated_template_under_context_parallelism(files, ranks):
    """One teacher reads the student's tokens, one makes its own with a date. A resume keeps the day."""
    shutil.copytree(files / "student", files / "dated too")
    (files / "dated too" / "chat_template.jinja").write_text(TEMPLATE.replace("%Y-%m-%d", "%d %b %Y"))
    teachers = [{"hf": str(files / "teacher")}, {"hf": str(files / "dated too"), "xtoken": {}}]
    (files / "two.yaml").write_text(json.dumps({"teachers": teachers}))

    def start(days, log, *more):
        more = ("--config", files / "two.yaml", *more)
        argv = flags(
            files, log, *more, teacher_hf=None, data_path="chat.jsonl", data_cache_path=f"{log} cache"
        )
        found = [Result(*one) for one in ranks.run(on_day_of_rank, len(days), [(day,) for day in days], argv)]
        assert {one.exit_code for one in found} == {0}, found[0].stderr
        return found[0].stdout + found[0].stderr

    first, second = "2026-11-26", "2026-11-27"
    start([first], "whole")
    split = ("--context-parallel-size", 2, "--save", files / "parts saved")
    start([first] * 2, "parts", *split, "--exit-interval", 1)
    said = start([second] * 2, "parts", *split, "--load", files / "parts saved")
    assert f"The whole run writes {first}" in said
    whole, parts = (read_metrics(files / log) for log in ("whole", "parts"))
    names = [key for key in whole[0] if key.startswith(("kd_loss", "num_aligned", "teacher_ce"))]
    assert len(names) == 2 + 2 * 2 + 2  # together and of each teacher
    for one, other in zip(whole, parts, strict=True):
        assert [other[key] for key in names] == pytest.approx([one[key] for key in names], rel=1e-5)
        assert other["num_loss_tokens"] == one["num_loss_tokens"] > 0


def test_a_teacher_cache_has_one_date(files):
    """An export that goes on another day, and a run from the cache, take its date; others are refused."""
    paths = dict(student_hf="student", teacher_hf="student", data_path="chat.jsonl")
    out = files / "teacher cache"
    out.mkdir()

    def config(*more, **others):
        return load_config(list(map(str, flags(files, "cached", *more, **paths | others)))).config

    def described(day, *more):
        today = mock.Mock(wraps=datetime.date, **{"today.return_value": datetime.date.fromisoformat(day)})
        with mock.patch.object(chat_input, "Date", today):
            plan = plan_export(config(*more), 1, out)
        kind = TopKExport(ExportSettings(out, 8), 4, "float32")
        return write_description(plan, kind.settings, kind.describe(plan, {"train": 20}))

    assert described("2026-11-26").data["chat_date"] == "2026-11-26"
    assert described("2026-11-27").data["chat_date"] == "2026-11-26"
    for more in (("--chat-date", "2026-11-27"), ("--chat-loss", "last")):
        with refused("teacher-cache-in-the-way: holds another teacher cache"):
            described("2026-11-27", *more)
        found = problems_of(list(map(str, flags(files, "c", "--teacher-topk", out, *more, **paths))))
        assert reports(found) == ["teacher-cache-differs: was made with"]
    assert chat_settings(config("--teacher-topk", out, teacher_hf=None)).date == "2026-11-26"


def test_a_teacher_cache_of_tokenised_corpora_asks_for_no_flag_of_conversations(files):
    """Whatever flags its export had: the packs are compared, and the run's flags would have no effect."""
    out = files / "tokenised cache"
    out.mkdir()
    paths = dict(student_hf="student", teacher_hf="student", data_path="chat.jsonl")
    argv = flags(files, "export", "--chat-loss", "last", **paths)
    plan = plan_export(load_config(list(map(str, argv))).config, 1, out)
    kind = TopKExport(ExportSettings(out, 8), 4, "float32")
    write_description(plan, kind.settings, kind.describe(plan, {"train": 20}))
    given = ["--input", files / "chat.jsonl", "--output-prefix", files / "plain ids"]
    given += ["--tokenizer-model", files / "student"]
    assert preprocess([str(word) for word in given]) == 0
    argv = flags(files, "from ids", "--teacher-topk", out, **paths | dict(data_path="plain ids"))
    assert not problems_of(list(map(str, argv)))


def test_an_export_that_replaces_another_does_not_take_its_date(files, ranks):
    out = files / "replaced cache"
    argv = flags(files, "cached", student_hf="student", teacher_hf="student", data_path="chat.jsonl")
    for day, k, date in (("26", 4, "26"), ("27", 4, "26"), ("28", 8, "28")):
        given = ["--out", str(out), "--overwrite", "--k", str(k), *argv]
        ((exit_code, _, stderr),) = ranks.run(on_day, 1, f"2026-11-{day}", given, "mkd.commands.topk")
        assert exit_code == 0, stderr
        assert json.loads((out / "meta.json").read_text())["data"]["chat_date"] == f"2026-11-{date}"


@pytest.mark.parametrize("damage", ["lost", "damaged"])
def test_the_date_is_that_of_the_newest_checkpoint_that_can_be_read(damage, tmp_path):
    """A run that falls back to an earlier checkpoint keeps the date of its first start."""
    for step in (1, 2):
        folder = tmp_path / f"iter_000000{step}"
        folder.mkdir()
        (folder / MEGATRON_FILE).touch()
        state = {"iteration": step, "consumed_samples": step, "skipped_iterations": 0}
        state |= {"fingerprints": {chat_setup.CHAT_DATE: "2026-01-02"}}
        (folder / STATE_FILE).write_text(json.dumps(state))
    (tmp_path / POINTER).write_text("2\n")
    (folder / STATE_FILE).write_text("{")
    if damage == "lost":
        shutil.rmtree(folder)
    config = load_config(["--load", str(tmp_path)]).config
    assert chat_setup.chat_settings(config).date == "2026-01-02"


@pytest.mark.parametrize(
    ("more", "codes"),
    [
        (("--chat-loss", "marks"), ["chat-template-without-marks"]),
        (("--chat-template-kwargs", "[]"), ["value-not-valid: --chat-template-kwargs"]),
        (("--chat-date", "today"), ["value-not-valid: is not a date"]),
        (("--chat-loss", "last"), []),
    ],
)
def test_flags_are_checked_before_the_start(more, codes, files):
    found = problems_of(flags(files, "checked", *more, data_path="chat.jsonl"))
    assert reports(found) == codes


def test_flags_that_no_template_reads_have_no_effect(files):
    more = ("--chat-loss", "last", "--chat-date", "2026-11-26", "--tokenizer-model", files / "teacher")
    found = problems_of(flags(files, "plain", *more))
    assert reports(found) == ["remove-flag: no effect"] * 2


def test_a_tokenised_corpus_tells_how_its_conversations_were_read(files, ranks):
    """Flags for conversations of the run would not change its tokens, so they are refused."""
    argv = ["--input", files / "chat.jsonl", "--output-prefix", files / "ids", "--tokenizer-model"]
    argv += [files / "student", "--chat-loss", "last", "--chat-date", "2020-02-29"]
    assert preprocess([str(word) for word in argv]) == 0
    (result,) = run_main(ranks, flags(files, "from ids", data_path="ids"))
    assert result.exit_code == 0, result.stderr
    said = result.stdout + result.stderr
    assert "(--chat-loss last)" in said and "wrote the date 2020-02-29" in said
    assert "(--chat-loss auto)" not in said and "--chat-date sets another" not in said
    found = problems_of(flags(files, "flags", "--chat-loss", "last", data_path="ids"))
    assert reports(found) == ["remove-flag: no effect"]
    assert "tokenised" in str(found[0])
    inspected = ["--input", str(files / "ids"), "--student", str(files / "student"), "--chat-loss", "last"]
    with refused("remove-flag: no effect"):
        show_packs(inspect_parser().parse_args(inspected), colour=False)


def test_ranks_that_chose_other_dates_do_not_start(files, ranks):
    """A start at midnight: rank 1 saw the next day."""
    days = [("2026-11-26",), ("2026-11-27",)]
    argv = flags(files, "midnight", "--tensor-model-parallel-size", 2, data_path="chat.jsonl")
    results = [Result(*one) for one in ranks.run(on_day_of_rank, 2, days, argv)]
    assert {one.exit_code for one in results} == {EXIT_USAGE}
    assert "--chat-date is 2026-11-26 on rank 0 and 2026-11-27 on rank 1" in results[0].stderr
