"""The rule for records of agents: which are taken, skipped, left out, refused, or kept for later."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace

import numpy as np
import pytest

from mkd.config.tag_rules import TaughtTags
from mkd.errors import DataError, ErrorList, ServerLost
from mkd.kinds.sampled.records.agent_record import OtherRun, RecordLimits, read_record
from mkd.kinds.sampled.records.record_folder import RecordFolder
from mkd.kinds.sampled.records.record_inbox import RecordInbox
from mkd.kinds.sampled.records.record_queue import RecordQueue
from mkd.kinds.sampled.records.record_rewards import RecordRewards
from mkd.kinds.sampled.records.record_source import _publish
from mkd.kinds.sampled.records.taken_steps import TakenSteps
from tests.reported import refused

LIMITS = RecordLimits(run="R", vocab_size=100, seq_length=8, group_size=2, needs_reward=True)
GOOD = dict(
    id="0",
    version="R-3",
    group="a",
    ids=[1, 2, 3, 4, 5, 6],
    loss=[0, 0, 1, 0, 0, 1],
    logp=[None, None, -0.1, None, None, -2.0],
    reward=1.0,
)


def make_inbox(tmp_path, *, bad=0, staleness=1, groups=1, save=True, timeout_s=600.0, last=3, resumes=True):
    (tmp_path / "in").mkdir(exist_ok=True)
    steps = TakenSteps(tmp_path / "save", "settings", staleness) if save else None
    if steps is not None:
        steps.folder.mkdir(exist_ok=True)
        (steps.folder / "run.json").write_text('{"run": "R"}')
        assert steps.begin(resumes, last) == "R"
    inbox = RecordInbox(
        folder=RecordFolder(tmp_path / "in"),
        queue=RecordQueue(staleness, LIMITS.seq_length),
        limits=LIMITS,
        steps=steps,
        groups=groups,
        timeout_s=timeout_s,
        max_bad_records=bad,
        refused_file=tmp_path / "refused.jsonl",
    )
    inbox.start()
    inbox.publish(last, tmp_path / "weights")
    return inbox


def put(tmp_path, name, *records):
    lines = [one if isinstance(one, str) else json.dumps(GOOD | one) for one in records]
    (tmp_path / "in" / name).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (dict(loss=[0, 1]), "ids has 6 numbers, and loss 2"),
        (dict(ids=[1, 2, 3, 4, 5, 100]), "an id is 100, and the models know 100"),
        (dict(ids=[1, 2, 3, 4, 5, -1]), "ids: -1 at token 6"),
        (dict(loss=[1, 0, 1, 0, 0, 1]), "the first token has loss"),
        (dict(loss=[0] * 6), "no token has loss"),
        (dict(logp=[None] * 5), "logp is 5, and ids has 6 tokens"),
        (dict(logp=[None, None, 0.1, None, None, -2.0]), "logp of token 3 is 0.1"),
        (dict(logp=[None] * 5 + [-2.0]), "logp of token 3 is None"),
        (dict(version="3"), "version is '3'"),
        (dict(version=[]), "version has another form"),
        (dict(version=[["R-4", 0], ["R-3", 4]]), "the spans of version are out of order"),
        (dict(version=[["R-3", 1]]), "the spans of version are out of order"),
        (dict(reward=None), "the record of a group of 2 has no advantage"),
        (dict(group_size=1), "the record of a group of 1 has no advantage"),
        (dict(group_size=0), "group_size is 0"),
        (dict(reward="good"), "reward is 'good'"),
        (dict(advantage=[1.0]), "advantage is 1, and ids has 6 tokens"),
        (dict(finish="tired"), "finish is 'tired'"),
        (
            dict(sampling={"temperature": 1.0, "top_p": 0.9}),
            "sampling changes the student's distribution: top_p",
        ),
        (dict(teacher_ids=[1]), "the record has teacher_ids"),
        (dict(id=None, logp=None), "the record has no id and no logp"),
    ],
)
def test_wrong_records_are_refused(change, what):
    with pytest.raises(DataError) as caught:
        read_record(GOOD | change, LIMITS)
    assert caught.value.what.startswith(what) and caught.value.do, caught.value


def test_tags_of_a_run_with_teachers_by_tag():
    limits = replace(LIMITS, tags=("code", "math"))
    assert read_record(GOOD | dict(tag="math"), limits).tag == "math"
    for tag, shown in ((None, "None"), ("chess", "'chess'")):
        with refused(f"record-value-not-valid: tag is {shown}"):
            read_record(GOOD | dict(tag=tag), limits)


def test_a_record_becomes_a_rollout_of_its_turns():
    spans = [["R-2", 0], ["R-3", 4]]
    record = read_record(GOOD | dict(version=spans, sampling={"top_k": -1}, tag="math"), LIMITS)
    rollout = record.rollout(iteration=4)
    assert rollout.request.ids.tolist() == [1, 2] and rollout.ids.tolist() == [3, 4, 5, 6]
    assert rollout.loss.tolist() == [True, False, False, True] and rollout.num_sampled == 2
    assert (
        rollout.logp.tolist() == [np.float32(-0.1), 0, 0, -2] and rollout.lag == 1 and rollout.tag == "math"
    )
    late = read_record(GOOD | dict(loss=[0, 1, 0, 0, 0, 0], logp=[None, -1, 9, 9, 9, 9]), LIMITS)
    assert late.rollout(4).ids.tolist() == [2], "what follows the last sampled token is left out"
    with pytest.raises(OtherRun):
        read_record(GOOD | dict(version="S-3"), LIMITS)


def test_a_record_needs_prompts_for_the_teachers_of_its_tag_alone():
    taught = {"knows": TaughtTags(("math",)), "helps": TaughtTags((), others=("math",))}
    limits = replace(LIMITS, teachers=dict.fromkeys(taught, False), taught=taught, tags=("code", "math"))
    record = read_record(GOOD | dict(tag="math", teacher_ids={"knows": [7, 8]}), limits)
    assert {name: ids.tolist() for name, ids in record.teacher_ids.items()} == {"knows": [7, 8]}
    record = read_record(GOOD | dict(tag="code", teacher_ids=[9]), limits)
    assert {name: ids.tolist() for name, ids in record.teacher_ids.items()} == {"helps": [9]}
    with pytest.raises(DataError, match="no teacher_ids for helps"):
        read_record(GOOD | dict(tag="code", teacher_ids={"knows": [7, 8]}), limits)


def test_the_rule(tmp_path):
    """Step 4 trains the weights after 3 updates; records may be one update old."""
    inbox = make_inbox(tmp_path, bad=1, groups=2)
    put(tmp_path, "1.jsonl", dict(id="0", group="old", version="R-1"), dict(id="1"), dict(id="1"))
    put(
        tmp_path,
        "2.jsonl",
        dict(id="2", group="b", version=[["R-2", 0], ["R-3", 4]]),
        dict(id="3", group="old"),
    )
    put(tmp_path, "3.jsonl", dict(id="4", group="later", version="R-4"), dict(id="5", group="later"))
    put(tmp_path, "4.jsonl", '{"torn', dict(id="6", version="S-9"))
    put(tmp_path, ".hidden.jsonl", dict(id="x"))
    put(tmp_path, "5.jsonl.partial", dict(id="y"))
    assert inbox.poll(4) == (0, None)
    put(tmp_path, "6.jsonl", dict(id="7", ids=[1] * 9, loss=[0] * 8 + [1], logp=[-1] * 9))
    put(tmp_path, "7.jsonl", dict(id="8", group="b"), dict(id="9", group="c", finish="error"))
    ready, taken = inbox.poll(4)
    assert ready == 2 and [(one.group, one.id) for one in taken] == [("a", "1"), ("b", "2"), ("b", "8")]
    assert inbox.queue.counted() == {
        "rollout/stale": 3,  # of the group that is too old, and of another run
        "rollout/duplicate": 1,
        "rollout/left_out": 2,  # too long, and an error
        "rollout/bad_records": 1,
    }
    assert [json.loads(line)["line"] for line in (tmp_path / "refused.jsonl").read_text().splitlines()] == [1]
    assert inbox.poll(5) == (1, None), "the group of version 4 was kept until the run has it"
    told = json.loads((tmp_path / "in" / "progress.json").read_text())
    assert told["version"] == "R-3" and told["state"] == "waiting" and told["complete_groups"] == 1
    put(tmp_path, "8.jsonl", dict(id="8", group="d"), "[1]")
    with pytest.raises(ErrorList, match="2 bad records"):
        inbox.poll(5)


def test_a_bad_record_ends_the_run_unless_allowed(tmp_path):
    inbox = make_inbox(tmp_path)
    put(tmp_path, "1.jsonl", dict(logp=[0] * 3))
    with pytest.raises(DataError) as caught:
        inbox.poll(4)
    assert "1.jsonl:1: logp is 3" in caught.value.what and "--max-bad-records 1" in caught.value.do


def test_records_that_contradict_their_group(tmp_path):
    inbox = make_inbox(tmp_path, bad=1)
    put(tmp_path, "1.jsonl", dict(id="1"), dict(id="2", group_size=3))
    assert [one.id for one in inbox.poll(4)[1]] == ["1"], "the bad one is left out of its group"


def test_waiting_ends_with_the_reason(tmp_path, caplog):
    inbox = make_inbox(tmp_path, timeout_s=0.5)
    put(tmp_path, "1.jsonl", dict(id="6", version="S-9"))
    inbox._said -= 100
    with caplog.at_level(logging.INFO):
        assert inbox.poll(4) == (0, None)
    assert "iteration 4 waits for records in" in caplog.text
    inbox._came -= 100
    with pytest.raises(ServerLost) as caught:
        inbox.poll(4)
    assert (
        "0 of 1 group complete" in caught.value.what
        and "of the runs S, and this one is R" in caught.value.what
    )
    inbox._came += 100
    inbox.is_stopped = lambda: True
    with pytest.raises(ServerLost, match="is stopped while it waits"):
        inbox.poll(4)


def test_a_resumed_run_takes_the_same_records_and_none_twice(tmp_path):
    inbox = make_inbox(tmp_path)
    put(tmp_path, "1.jsonl", dict(id="1"), dict(id="2"))
    put(tmp_path, "2.jsonl", dict(id="3", group="b"), dict(id="4", group="b"), dict(id="5", group="c"))
    first = inbox.poll(4)[1]
    put(tmp_path, "3.jsonl", dict(id="6", group="c"))
    second = inbox.poll(5)[1]
    again = make_inbox(tmp_path, last=3)
    assert [one.id for one in again.replay(4)] == [one.id for one in first] == ["1", "2"]
    assert [one.id for one in again.replay(5)] == [one.id for one in second] == ["3", "4"]
    assert again.replay(6) is None
    assert [one.id for one in again.poll(5)[1]] == ["5", "6"]
    assert not any(again.queue.counted().values()), (
        "files are read again without counting their records twice"
    )
    third = make_inbox(tmp_path, last=3)
    assert third.folder.known == {"1.jsonl", "2.jsonl", "3.jsonl"}, "nothing waits in them"
    assert make_inbox(tmp_path).steps.begin(resumes=False, last=3) != "R"


def test_lost_records_of_taken_groups_are_counted_once(tmp_path):
    """Their file is read again at each resume, because another group in it waits."""
    inbox = make_inbox(tmp_path, bad=3)
    lost = dict(id="2", group_size=4, finish="error"), dict(id="3", group_size=4, logp=[0])
    several = dict(id="1", group_size=4), *lost, dict(id="4", group_size=3), '{"torn', dict(id="5", group="b")
    put(tmp_path, "1.jsonl", *several)
    assert [one.id for one in inbox.poll(4)[1]] == ["1"]
    assert inbox.queue.counted()["rollout/bad_records"] == 3
    refused_before = (tmp_path / "refused.jsonl").read_text()
    again = make_inbox(tmp_path, bad=1, last=4)
    put(tmp_path, "2.jsonl", dict(id="6", group="b"))
    assert [one.id for one in again.poll(5)[1]] == ["5", "6"]
    assert not again.queue.groups and not any(again.queue.counted().values())
    assert (tmp_path / "refused.jsonl").read_text() == refused_before
    assert make_inbox(tmp_path, last=4).folder.known == {"1.jsonl", "2.jsonl"}, "nothing waits in them"
    put(tmp_path, "3.jsonl", "torn")
    again.poll(6)  # the limit is of this start: this is its first bad record
    put(tmp_path, "4.jsonl", "torn")
    with pytest.raises(ErrorList) as caught:
        again.poll(6)
    assert "2 bad records" in caught.value.report()


def test_records_of_an_abandoned_branch_are_of_another_run(tmp_path):
    """The agent sampled with weights after 4 updates; the run goes back, twice with other settings."""
    inbox = make_inbox(tmp_path)
    put(tmp_path, "1.jsonl", dict(id="1"), dict(id="2"))
    put(tmp_path, "2.jsonl", dict(id="3", group="b"), dict(id="4", group="b"))
    assert inbox.poll(4)[1] and inbox.poll(5)[1]
    others = TakenSteps(tmp_path / "save", "others", max_staleness=1)
    assert others.begin(resumes=True, last=5) == "R", "no step is taken back"
    name = others.begin(resumes=True, last=4)
    assert name != "R" and others.begin(resumes=True, last=4) == name
    assert {*others.known_ids()} == {"1", "2"} and others.read_files() == {"1.jsonl"}
    limits = replace(LIMITS, run=name)
    inbox = replace(inbox, steps=others, limits=limits, queue=RecordQueue(1, LIMITS.seq_length))
    put(tmp_path, "3.jsonl", dict(id="5", version="R-4"), dict(id="6", version="R-4"))
    assert inbox.poll(5) == (0, None) and inbox.queue.counted()["rollout/stale"] == 2
    put(tmp_path, "4.jsonl", *(dict(id=f"{one}", group="n", version=f"{name}-4") for one in (7, 8)))
    assert [one.lag for one in inbox.poll(5)[1]] == [0, 0]
    back = TakenSteps(tmp_path / "save", "settings", max_staleness=1)
    assert back.begin(resumes=True, last=3) not in ("R", name), "step 5 of the others is removed"
    again = back.read(4, replace(LIMITS, run=back.run))
    assert [one.id for one in again] == ["1", "2"], "a step that stays keeps records of its own name"


def test_published_weights_stay_beside_higher_numbers_of_an_earlier_start(tmp_path):
    """A run that died before its first checkpoint starts again at step 0, with the folders of later steps."""
    weights = tmp_path / "weights"
    for age, step in enumerate((28, 27, 29)):  # from the newest to the oldest
        (weights / f"step_{step:07d}").mkdir(parents=True)
        os.utime(weights / f"step_{step:07d}", (1e9 - age, 1e9 - age))
    inbox = make_inbox(tmp_path)
    for version, kept in ((0, {0, 28}), (1, {0, 1}), (2, {1, 2})):
        path = weights / f"step_{version:07d}"
        path.mkdir()
        _publish(inbox, version, path)
        told = json.loads((tmp_path / "in" / "progress.json").read_text())
        assert told["weights"] == str(path)
        assert {one.name for one in weights.iterdir()} == {f"step_{step:07d}" for step in kept}


def test_a_damaged_step_is_refused(tmp_path):
    inbox = make_inbox(tmp_path)
    put(tmp_path, "1.jsonl", dict(id="1"), dict(id="2"))
    inbox.poll(4)
    path = tmp_path / "save" / "step_0000004.jsonl"
    path.write_text(path.read_text().replace('"reward": 1.0', '"reward": 2.0', 1))
    with pytest.raises(DataError, match="is damaged"):
        inbox.replay(4)


def test_steps_are_forgotten_when_no_record_of_them_could_come_again(tmp_path):
    steps = TakenSteps(tmp_path, "settings", max_staleness=1, oldest_checkpoint=lambda: 5)
    record = read_record(GOOD, LIMITS)
    for step in range(1, 8):
        steps.write(step, [record], [])
    assert [step for step, _ in steps._files()] == [4, 5, 6, 7]


def test_advantages_of_groups_of_different_sizes():
    rewards = dict(a=[1.0, 3.0], b=[2.0, None, 5.0], c=[4.0])
    rollouts = []
    for group, values in rewards.items():
        for number, reward in enumerate(values):
            more = dict(advantage=0.5) if reward is None else {}
            given = dict(
                id=f"{group}{number}", group=group, reward=reward, group_size=len(values) + 1, **more
            )
            rollouts.append(read_record(GOOD | given, LIMITS).rollout(4))
    judged, figures = RecordRewards()(rollouts, 4)
    found = [round(one.advantage, 3) for one in judged]
    assert found == [-0.707, 0.707, -0.707, 0.5, 0.707, 0.0]
    assert figures["reward/mean"] == pytest.approx(3.0) and figures["reward/std0_groups"] == pytest.approx(
        1 / 3
    )


def test_a_record_has_the_prompts_of_teachers_with_contexts():
    def read(teacher_ids):
        found = read_record(GOOD | {"teacher_ids": teacher_ids}, limits).rollout(4).of_teachers
        return {name: ids.tolist() for name, ids in found.items()}

    limits = replace(LIMITS, teachers={"a": False, "b": True})
    assert read([7, 8]) == {"a": [7, 8], "b": [7, 8]}
    assert read({"a": [7]}) == {"a": [7]}
    with refused("record-incomplete"):
        read({"b": [7]})
    for wrong in ([], "7", [7, -1], [[7]], [True]):
        with refused("record-value-not-valid"):
            read(wrong)
    with refused("token-beyond-vocabulary"):
        read([100])
