"""The settings of a run for conversations: which messages have loss, variables and date of the template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mkd.checkpoint.folders import find_checkpoint, read_state, saved_iterations
from mkd.config.data_files import all_tokenised
from mkd.config.run_files import CheckpointConfig, DataConfig
from mkd.config.schema import Config
from mkd.data.prompts import PromptSet
from mkd.data.stored.cache_meta import read_description
from mkd.errors import CheckpointError, DataError, UsageError
from mkd.plan.checks.no_effect import no_effect
from mkd.tokenizers.chat_input import ChatSettings
from mkd.tokenizers.tokenizer import Tokenizer

CHAT_DATE = "chat.date"  # among the fingerprints of a checkpoint


def chat_settings(
    config: Config,
    out: Path | None = None,  # folder of a teacher cache that is made
) -> ChatSettings:
    """Return the settings of the flags. Raises UsageError for values that are not valid.

    Without --chat-date, the date is that of the run that saved the checkpoint of --load, else that of the
    teacher cache, else today's.
    """
    data = config.data
    settings = ChatSettings.from_flags(data.chat_loss, data.chat_template_kwargs, data.chat_date)
    caches = [out, *(Path(name) for one in config.teachers if (name := one.topk or one.hidden))]
    exported = (_exported_date(one) for one in caches if one is not None)
    known = settings.date or _saved_date(config.checkpoint) or next(filter(None, exported), None)
    return settings.dated(known)


def chat_problems(tokenizer: Tokenizer, config: Config) -> Iterator[UsageError]:
    """Yield the problems of flags for conversations, if the run reads none itself."""
    data = config.data
    if not tokenizer.has_chat_template:
        why = "the tokenizer has no chat template"
    elif not config.rollout.is_on and all_tokenised(data):
        why = "the corpora are tokenised, with the settings that `mkd preprocess` had"
    else:
        return
    for flag, value, default in (
        ("chat-loss", data.chat_loss, DataConfig.chat_loss),
        ("chat-template-kwargs", data.chat_template_kwargs, None),
        ("chat-date", data.chat_date, None),
    ):
        if value != default:
            yield no_effect(f"--{flag} {value}", why, "remove it")


def date_of(tokenizers: Iterable[Tokenizer]) -> str | None:
    """Return the date that chat templates write, if one does. All have the settings of the run."""
    return next((one.chat_date for one in tokenizers if one.chat_date is not None), None)


def describe_chat(
    tokenizers: Sequence[Tokenizer],  # the student's first
    data_sets: Iterable[Any],
    prompts: PromptSet | None,
) -> list[str]:
    """Return lines on how the run reads conversations; none if it has none.

    A corpus of `mkd preprocess` was read with the settings in its description, not with those of the run.
    """
    reads_some = prompts is not None and any(one.is_chat for one in prompts.prompts)
    lines = tokenizers[0].describe_chat()[:1] if reads_some else []
    for meta in (member.store.meta for one in data_sets if one is not None for member in one.members):
        is_own = bool(meta.get("cache_key"))
        lines += [meta["chat"]] if "chat" in meta else []
        if meta.get("chat_date") and not is_own:
            lines.append(f"note: `mkd preprocess` wrote the date {meta['chat_date']} into conversations")
        reads_some |= "chat" in meta and is_own
    dates = [line for tokenizer in tokenizers for line in tokenizer.describe_date()]
    return list(dict.fromkeys([*lines, *(dates if reads_some else ())]))


def _saved_date(checkpoint: CheckpointConfig) -> str | None:
    """Return the date in the checkpoint from which the run resumes, if there is one.

    If that is lost or damaged, the run resumes from an earlier one: the newest that can be read counts.
    """
    for folder in _candidates(checkpoint):
        try:
            found = read_state(folder).get("fingerprints", {}).get(CHAT_DATE)
        except (CheckpointError, OSError):  # reported where the checkpoint is loaded
            continue
        if isinstance(found, str):
            return found
    return None


def _candidates(checkpoint: CheckpointConfig) -> Iterator[Path]:
    if not checkpoint.load:
        return
    with suppress(CheckpointError):
        if folder := find_checkpoint(Path(checkpoint.load), checkpoint.ckpt_step):
            yield folder
    yield from saved_iterations(Path(checkpoint.load))


def _exported_date(folder: Path) -> str | None:
    """Return the date in the teacher cache, if there is one."""
    try:
        return read_description(folder).chat_date
    except DataError:  # reported where the cache is read, or there is none yet
        return None
