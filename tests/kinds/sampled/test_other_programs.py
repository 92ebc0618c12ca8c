"""Dumps of other programs, made by hand after their sources, as records and as token records."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mkd.commands.data import main
from mkd.data.records.parsing import parse_row
from mkd.kinds.sampled.records.agent_record import RecordLimits, read_record
from tests.reported import reported_codes

LIMITS = RecordLimits(run="R", vocab_size=100, seq_length=100, group_size=2, needs_reward=True)
SAMPLE = dict(
    group_index=7,
    index=3,
    tokens=[1, 2, 3, 4, 5],
    response_length=3,
    loss_mask=[1, 0, 1],
    rollout_log_probs=[-0.5, 0.0, -1.0],
    weight_versions=["R-3", "R-2"],
    reward={"score": 1.0, "format": 0.0},
    status="completed",
    metadata={"x": torch.zeros(2)},
    remove_sample=False,
)
VERL = dict(
    prompt_ids=[1, 2],
    response_ids=[3, 4, 5],
    response_mask=[1, 0, 1],
    response_logprobs=[-0.5, 0.0, -1.0],
    reward_score=1.0,
    num_turns=3,
)
PRIME = dict(
    token_ids=[1, 2, 3, 4, 5],
    mask=[False, False, True, False, True],
    logprobs=[0.0, 0.0, -0.5, 0.0, -1.0],
    temperatures=[1.0] * 5,
    env_name="math",
    advantages=[0.0, 0.0, 0.5, 0.0, 0.5],
    reward=1.0,
)
OLD_PRIME = dict(
    prompt_ids=[1, 2],
    prompt_mask=[False, False],
    completion_ids=[3, 4, 5],
    completion_mask=[True, False, True],
    completion_logprobs=[-0.5, 0.0, -1.0],
    advantage=0.5,
    reward=1.0,
)
VERSION = ("--version", "R-2")


def dump(tmp_path, name, *samples):
    path = tmp_path / name
    if name.endswith(".pt"):
        torch.save(dict(rollout_id=12, samples=list(samples)), path)
    else:
        path.write_text("".join(json.dumps(one) + "\n" for one in samples))
    return str(path)


@pytest.mark.parametrize(
    ("program", "name", "sample", "flags"),
    [
        ("slime", "a.pt", SAMPLE, ("--reward-key", "score")),
        ("verl", "a.jsonl", VERL, VERSION),
        ("prime-rl", "a.jsonl", PRIME, VERSION),
        ("prime-rl", "a.jsonl", OLD_PRIME, VERSION),
    ],
)
def test_dumps_become_records_and_tokens(tmp_path, capsys, program, name, sample, flags):
    path, out = dump(tmp_path, name, sample, sample), tmp_path / "out.jsonl"
    assert main(["convert-records", "--from", program, path, "--out", str(out), *flags]) == 0
    assert capsys.readouterr().out == f"2 records in {out}\n"
    records = [read_record(json.loads(line), LIMITS) for line in out.read_text().splitlines()]
    assert len({one.id for one in records}) == 2 and len({one.group for one in records}) == 1
    for one in records:
        assert one.ids.tolist() == [1, 2, 3, 4, 5] and one.group_size == 2
        assert one.loss.tolist() == [False, False, True, False, True]
        assert one.logp.tolist() == [0, 0, np.float32(-0.5), 0, -1]
        assert (one.versions, one.finish, one.reward) == ((2,), "stop", 1.0)
    assert main(["convert-records", "--from", program, path, "--out", str(out), *flags]) == 64
    tokens = tmp_path / "tokens.jsonl"
    assert main(["convert-records", "--from", program, path, "--out", str(tokens), "--tokens"]) == 0
    for line in tokens.read_bytes().splitlines():
        assert parse_row(line).values == (((1, 2, 3, 4, 5), (0, 0, 1, 0, 1)),)


def test_dumps_of_one_name_have_different_ids(tmp_path, capsys):
    """Two runs have a folder `out` with a file `0.jsonl`, and a group has a record of each."""
    paths = []
    for run, reward in (("a", 1.0), ("b", 0.0), ("copy", 1.0)):
        (tmp_path / run / "out").mkdir(parents=True)
        paths.append(dump(tmp_path / run / "out", "0.jsonl", VERL | dict(reward_score=reward)))
    convert = ["convert-records", "--from", "verl", *VERSION, "--out"]
    ids = []
    for name, dumps in (("both", paths[:2]), ("again", paths[:1])):
        assert main([*convert, str(tmp_path / name), *dumps]) == 0
        ids.append([json.loads(line)["id"] for line in (tmp_path / name).read_text().splitlines()])
    assert len({*ids[0]}) == 2 and ids[1] == ids[0][:1], "a dump that is converted again keeps its ids"
    capsys.readouterr()
    assert main([*convert, str(tmp_path / "twice"), *paths]) == 65
    assert reported_codes(capsys.readouterr().err) == ["record-value-not-valid: has the same content as"]


def test_samples_of_slime_that_failed_or_are_removed(tmp_path, capsys):
    failed = [
        SAMPLE | dict(status="aborted"),
        SAMPLE | dict(remove_sample=True),
        SAMPLE | dict(loss_mask=None),
    ]
    path, out = dump(tmp_path, "a.pt", *failed), tmp_path / "out.jsonl"
    assert main(["convert-records", "--from", "slime", path, "--out", str(out), "--reward-key", "score"]) == 0
    records = [read_record(json.loads(line), LIMITS) for line in out.read_text().splitlines()]
    assert [(one.finish, one.loss[2:].tolist()) for one in records] == [
        ("error", [True, False, True]),
        ("stop", [True, True, True]),
    ]


@pytest.mark.parametrize(
    ("program", "name", "sample", "flags", "report"),
    [
        ("slime", "a.pt", SAMPLE, (), "record-incomplete: the reward has the parts"),
        (
            "slime",
            "a.pt",
            SAMPLE | dict(weight_versions=["2"], reward=1.0),
            (),
            "record-incomplete: which weights",
        ),
        (
            "slime",
            "a.jsonl",
            SAMPLE | dict(metadata={}),
            (),
            "record-without-known-keys: is no dump of slime",
        ),
        (
            "slime",
            "a.pt",
            SAMPLE | dict(metadata=LIMITS),
            (),
            "record-without-known-keys: is no dump of slime",
        ),
        (
            "verl",
            "a.jsonl",
            dict(input="a", output="b", score=1),
            (),
            "record-without-known-keys: has no token ids",
        ),
        (
            "verl",
            "a.jsonl",
            VERL | dict(response_mask=[1]),
            VERSION,
            "record-without-known-keys: has a mask of 1",
        ),
        ("verl", "a.jsonl", VERL, (), "record-incomplete: it does not say which weights"),
        ("verl", "a.jsonl", VERL | dict(response_logprobs=None), VERSION, "record-incomplete: has no logp"),
        ("prime-rl", "rollouts.bin", PRIME, VERSION, "record-without-known-keys: cannot be read safely"),
        (
            "prime-rl",
            "a.jsonl",
            PRIME | dict(temperatures=[0.8] * 5),
            VERSION,
            "record-without-known-keys: not 1",
        ),
        (
            "prime-rl",
            "a.jsonl",
            PRIME | dict(advantages=[["rl", [1.0]]]),
            VERSION,
            "record-without-known-keys: several",
        ),
        ("prime-rl", "a.jsonl", {"text": "a"}, VERSION, "record-without-known-keys: has no prompt_ids"),
    ],
)
def test_dumps_that_are_refused(tmp_path, capsys, program, name, sample, flags, report):
    path, out = dump(tmp_path, name, sample), tmp_path / "out.jsonl"
    assert main(["convert-records", "--from", program, path, "--out", str(out), *flags]) == 65
    assert reported_codes(capsys.readouterr().err) == [report] and not out.exists()
