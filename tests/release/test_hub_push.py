"""Push exports over HTTP to a hub on this machine, and refuse before a run what the hub would refuse."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mkd.release.card_file import marked
from mkd.release.hub_push import HubRepository
from tests.release.fake_hub import TOKEN, running_hub
from tests.reported import refused, reported_codes
from tests.train.command import flags, make_files

WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with running_hub() as hub:
        yield hub


@pytest.fixture
def export(tmp_path):
    for name, content in {
        "config.json": b"{}",
        "model.safetensors": WEIGHTS,
        "README.md": marked("# student").encode(),
        "diary.txt": b"not of the model",
    }.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_an_export_reaches_a_new_private_repository_whole(hub, export):
    repository = HubRepository("student", hub.url)
    assert repository.problem() is None
    assert not any(call.startswith("POST") for call in hub.calls)  # a question makes no repository
    assert repository.push(export).endswith("ann/student/commit/" + 40 * "b")
    files = hub.repositories["ann/student"]
    assert files.keys() == {"config.json", "model.safetensors", "README.md"}
    assert files["model.safetensors"] == WEIGHTS and hub.private["ann/student"]
    # Again, after more training: the former export may be replaced, and its shards leave.
    files["model-00001-of-00002.safetensors"] = b"old"
    assert repository.problem() is None
    repository.push(export)
    assert "model-00001-of-00002.safetensors" not in files and "config.json" in files


def test_a_card_of_somebody_else_stays(hub, export):
    hub.repositories["ann/student"] = {"README.md": b"# my own words"}
    assert HubRepository("student", hub.url).problem() is None
    HubRepository("student", hub.url).push(export)
    assert hub.repositories["ann/student"]["README.md"] == b"# my own words"
    assert hub.repositories["ann/student"]["model.safetensors"] == WEIGHTS


def test_a_model_of_somebody_else_is_replaced_only_with_overwrite(hub):
    hub.repositories["ann/student"] = {"model.safetensors": b"", "README.md": marked("# a").encode() + b"!"}
    repository = HubRepository("student", hub.url)
    with refused("already-exists: is not an export of mkd"):
        raise repository.problem()
    assert repository.problem(overwrite=True) is None
    with refused("names-equal: is a model that this run reads"):
        raise repository.problem(["ann/student"], overwrite=True)


FINE = {"role": "fineGrained", "fineGrained": {"scoped": []}}
OWN = {"entity": {"name": "ann"}, "permissions": ["repo.write"]}
REFUSALS = {
    "hub-login: may only read": ("student", {"role": "read"}, ()),
    "hub-login: fine-grained token may not write": ("student", FINE, ()),
    "hub-login: is not a member of club": ("club/student", {"role": "write"}, ()),
    "hub-login: in club is read": ("club/student", {"role": "write"}, [dict(name="club", roleInOrg="read")]),
    "value-not-valid: not a name of the hub": ("a/b/c", {"role": "write"}, ()),
}


@pytest.mark.parametrize("expected", REFUSALS)
def test_an_upload_without_the_right_is_refused_before_training(expected, hub):
    name, token, orgs = REFUSALS[expected]
    hub.account.update(orgs=orgs, auth={"accessToken": token})
    with refused(expected):
        raise HubRepository(name, hub.url).problem()


def test_rights_that_suffice(hub):
    hub.account["auth"]["accessToken"] = FINE | {"fineGrained": {"scoped": [OWN]}}
    assert HubRepository("student", hub.url).problem() is None
    hub.account.update(orgs=[dict(name="club", roleInOrg="write")], auth={"accessToken": {"role": "write"}})
    assert HubRepository("club/student", hub.url).problem() is None
    hub.repositories["other/student"] = {}  # of somebody who has given access, or not
    assert HubRepository("other/student", hub.url).problem() is None
    hub.may_write = False
    with refused("hub-login: no right to write"):
        raise HubRepository("other/student", hub.url).problem()


def test_no_token_a_wrong_one_and_no_hub(hub, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with refused("hub-login: the hub refuses the token"):
        raise HubRepository("student", hub.url).problem()
    with refused("hub-unreachable: cannot be asked"):
        raise HubRepository("student", "http://127.0.0.1:9").problem()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with refused("hub-login: no token"):
        raise HubRepository("student", hub.url).problem()


def test_a_failed_upload_says_how_to_repeat_it(hub, export):
    hub.fails = True
    with refused("after-export-failed: the upload to student failed"):
        HubRepository("student", hub.url).push(export)


@pytest.mark.slow
def test_a_run_and_an_export_reach_the_hub(hub, tmp_path):
    """The upload comes last: where it fails, the exit code says so, and the export is there."""
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}

    def command(*words):
        argv = [sys.executable, "-m", "mkd", *map(str, words)]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300)

    files = make_files(tmp_path)
    words = flags(
        files, "run", "--save", files / "run", "--export-hf", files / "hf", "--push-to-hub", "first"
    )
    done = command("train", *words)
    assert done.returncode == 0, done.stderr
    uploaded = hub.repositories["ann/first"]
    assert "uploaded to https://huggingface.co/ann/first/commit/" in done.stdout
    assert {"README.md", "config.json", "tokenizer.json"} <= uploaded.keys()
    assert all((files / "hf" / name).read_bytes() == content for name, content in uploaded.items())
    export = ("export", "--load", files / "run", "--hf-out", files / "again", "--push-to-hub")
    done = command(*export, "second")
    assert done.returncode == 0 and hub.repositories["ann/second"].keys() == uploaded.keys(), done.stderr
    hub.fails = True
    done = command(*export, "third", "--overwrite")
    assert done.returncode == 66 and reported_codes(done.stderr) == ["after-export-failed"]
    hub.account["auth"]["accessToken"]["role"] = "read"
    done = command("train", *flags(files, "none", "--export-hf", files / "no", "--push-to-hub", "first"))
    assert done.returncode == 64 and reported_codes(done.stderr) == ["hub-login: may only read"]
    assert not (files / "no").exists()
