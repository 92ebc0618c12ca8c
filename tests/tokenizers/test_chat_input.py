"""Settings for conversations: valid flags, names that only mkd sets, the date of templates."""

from __future__ import annotations

import pickle

import pytest
from huggingface_hub import constants

from mkd.errors import DataError, UsageError
from mkd.tokenizers.chat_input import ChatSettings, Conversation, check_template_kwargs
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.tokenizers.load import load_tokenizer
from tests.reported import refused
from tests.tokenizers.chat_templates import PLAIN
from tests.tokenizers.trained import CHATML, train_hf_tokenizer

DATED = "{{ '<|im_start|>' + strftime_now('%d %b %Y') + strftime_now(\"/%m\") + '<|im_end|>' }}" + CHATML


@pytest.mark.parametrize(
    ("variables", "date", "code"),
    [
        ("{", None, "value-not-valid: --chat-template-kwargs"),
        ("[1]", None, "value-not-valid: --chat-template-kwargs"),
        ('{"enable_thinking": true, "tools": []}', None, "remove-flag: --chat-template-kwargs sets"),
        (None, "26.11.2026", "value-not-valid: is not a date"),
        (None, "20261126", "value-not-valid: is not a date"),
    ],
)
def test_flags_that_are_not_valid_are_refused(variables, date, code):
    with refused(code, UsageError):
        ChatSettings.from_flags("auto", variables, date)


def test_flags_become_settings():
    found = ChatSettings.from_flags("last", '{"enable_thinking": false}', "2026-11-26")
    assert found == ChatSettings("last", {"enable_thinking": False}, "2026-11-26")


@pytest.mark.parametrize("variables", [3, {"add_generation_prompt": True}])
def test_a_record_sets_no_reserved_name(variables):
    with refused("record-value-not-valid", DataError):
        check_template_kwargs(variables)
    with refused("record-value-not-valid", DataError):
        HuggingFaceTokenizer(train_hf_tokenizer()).apply_chat_template(
            Conversation(PLAIN, template_kwargs=variables)
        )


def test_a_template_writes_the_date_of_the_settings():
    settings = ChatSettings(date="2020-02-29")
    tokenizer = pickle.loads(pickle.dumps(HuggingFaceTokenizer(train_hf_tokenizer(DATED), settings)))
    for ids in (
        tokenizer.apply_chat_template(Conversation(PLAIN))[0],
        tokenizer.generation_prompt(Conversation(PLAIN)),
        tokenizer.encode_turns(Conversation(PLAIN)).encoded.ids.tolist(),
    ):
        assert tokenizer.decode(ids).startswith("<|im_start|>29 Feb 2020/02<|im_end|>")
    assert tokenizer.chat_date == "2020-02-29" and "2020-02-29" in tokenizer.describe_chat()[1]
    tokenizers = [
        HuggingFaceTokenizer(train_hf_tokenizer(template), ChatSettings(date=date))
        for template in (DATED, CHATML)
        for date in ("2020-02-29", "2020-03-01", None)
    ]
    assert len({one.chat_fingerprint for one in tokenizers}) == 4, "the date counts only where it is written"
    assert len({one.fingerprint for one in tokenizers}) == 2, "texts have the same ids on every day"


def test_a_date_that_cannot_be_kept_is_said():
    changing = DATED.replace("'%d %b %Y'", "'%d' + ' %b'")
    tokenizer = HuggingFaceTokenizer(train_hf_tokenizer(changing), ChatSettings(date="2020-02-29"))
    assert "change every day" in tokenizer.describe_chat()[1]


def test_stops_of_the_models_folder_count_as_what_decides_masks(tmp_path, monkeypatch):
    train_hf_tokenizer().save_pretrained(tmp_path)
    stops = tmp_path / "generation_config.json"

    def prints() -> tuple[str, str]:
        tokenizer = load_tokenizer("HuggingFaceTokenizer", str(tmp_path))
        return tokenizer.fingerprint, tokenizer.chat_fingerprint

    alone, chats = prints()
    stops.write_text('{"eos_token_id": 0}')
    assert prints() == (alone, chats) == (alone, alone), "all know EOS"
    stops.write_text('{"eos_token_id": [0, 2]}')
    assert prints()[0] == alone != prints()[1]
    monkeypatch.chdir(tmp_path)
    assert HuggingFaceTokenizer(train_hf_tokenizer()).chat_fingerprint == alone, "no file of this folder"


def test_stops_of_a_hub_id_are_those_in_the_hub_cache(tmp_path, monkeypatch):
    """The cache is laid out as the hub's: models--ORG--NAME, refs/main, a snapshot with links into blobs."""
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    train_hf_tokenizer().save_pretrained(repository / "blobs")
    (repository / "blobs" / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    (repository / "blobs" / "config.json").write_text('{"model_type": "llama"}')
    for blob in (repository / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    of_id, of_folder = (load_tokenizer("HuggingFaceTokenizer", one) for one in ("org/tiny", str(snapshot)))
    assert of_id.chat_fingerprint == of_folder.chat_fingerprint != of_id.fingerprint
    (snapshot / "generation_config.json").unlink()
    without = load_tokenizer("HuggingFaceTokenizer", "org/tiny")
    assert without.chat_fingerprint == without.fingerprint == of_id.fingerprint
