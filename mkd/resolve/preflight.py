"""Find problems of tokenizers, data and the export folder before processes meet and weights are read.

All ranks read the same few files, so all of them refuse the run together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mkd.checkpoint.hf.hf_assets import SENTENCEPIECE_ASSET, TOKENIZER_PATTERNS
from mkd.checkpoint.hf.hf_hub import resolve_hf
from mkd.config.data_files import CORPUS_SUFFIXES, KNOWN_FILES, is_raw
from mkd.config.schema import Config
from mkd.config.tag_rules import TagRules
from mkd.data.corpus.documents import require_eos, require_numbers, require_pairs, require_records
from mkd.data.corpus.sources import find_prefix, require_text, require_vocabulary
from mkd.data.corpus.store import TokenStore
from mkd.data.first_records import CONVERSATION_PAIR, CONVERSATIONS, WITHOUT_EOS, kinds_of_records
from mkd.data.images.conversation import ConversationImages
from mkd.data.records.kinds import PAIR
from mkd.data.records.wanted import WantedRecords
from mkd.data.tags import require_tag_key
from mkd.errors import DataError, MkdError, UsageError, collect_error
from mkd.plan.facts import RunFacts
from mkd.resolve.chat_setup import chat_problems, chat_settings
from mkd.resolve.image_reader import open_images
from mkd.resolve.model_source import ModelSource
from mkd.tokenizers.chat_input import ChatSettings
from mkd.tokenizers.load import load_tokenizer, open_tokenizer
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.tokenizers.tokenizer_files import has_tokenizer


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of a run, opened once for the checks and the run itself."""

    student: Tokenizer
    # One for each teacher that runs; None: it reads the student's tokens.
    teachers: tuple[Tokenizer | None, ...]
    source: Path | None  # folder or SentencePiece file of the student's; None: transformers cannot read it
    notes: tuple[str, ...]  # shown to the user
    images: ConversationImages | None = None  # reads the images of conversations; None: the student has none

    @property
    def opened(self) -> list[Tokenizer]:
        """All tokenizers of the run, the student's first."""
        return [self.student, *(one for one in self.teachers if one is not None)]


def open_tokenizers(
    problems: list[MkdError],
    facts: RunFacts,
    student: ModelSource | None,  # None: reported before
    teachers: Sequence[ModelSource | None],
) -> Tokenizers | None:
    """Open the tokenizers of a run; compare them with its models and each other. Add to `problems`.

    Return None if the student's tokenizer cannot be opened.
    """
    config = facts.config
    name = config.data.tokenizer_model or (str(student.assets) if student else None)
    if name is None:
        return None
    chat = collect_error(problems, partial(chat_settings, config))
    tokenizer = collect_error(problems, lambda: load_tokenizer(config.data.tokenizer_type, name, chat))
    if tokenizer is None:
        return None
    problems += chat_problems(tokenizer, config)
    if student is not None:
        problems += wider_than_head(tokenizer, config, "student", student)
    own: list[Tokenizer | None] = []
    notes: list[str] = []
    for role, settings, source in zip(facts.roles, config.teachers, teachers, strict=False):
        if source is not None and settings.xtoken is not None:
            own.append(collect_error(problems, partial(open_own_tokenizer, role, source, chat)))
            continue
        own.append(None)
        problems += same_vocabulary_problems(tokenizer, config, role, source) if source else []
        if source is not None and not has_tokenizer(source.assets):
            assumed = "so mkd assumes that it has the student's ids"
            notes.append(f"note: the {role}'s folder {source.assets} has no tokenizer, {assumed}")
    files = collect_error(problems, lambda: tokenizer_source(config.data.tokenizer_type, name))
    images = None
    if student is not None:
        folders = [None if one is None else one.assets for one in teachers]
        images = collect_error(problems, partial(open_images, config, student.assets, folders, tokenizer))
    return Tokenizers(tokenizer, tuple(own), files, (*notes, *_notes(tokenizer, config, student)), images)


def tokenizer_source(tokenizer_type: str, name: str) -> Path | None:
    """Return the tokenizer's folder or file, for `HFAssets`. Raises CheckpointError if the hub lacks it."""
    if tokenizer_type == "TiktokenTokenizer":
        return None
    return Path(name) if tokenizer_type == "SentencePieceTokenizer" else resolve_hf(name, TOKENIZER_PATTERNS)


def _notes(tokenizer: Tokenizer, config: Config, student: ModelSource | None) -> Iterator[str]:
    """Yield notes on a --tokenizer-model outside the student's folder, and on the tokenizer of exports."""
    name, kind = config.data.tokenizer_model, config.data.tokenizer_type
    if name is None:
        return
    if student is not None and name != str(student.assets) and has_tokenizer(student.assets):
        with suppress(UsageError):  # the student's own tokenizer is not used, so it need not be readable
            unused = load_tokenizer("HuggingFaceTokenizer", str(student.assets))
            difference = tokenizer.vocabulary_difference(unused)
            if difference is not None:
                other = f"--tokenizer-model {name} is not the tokenizer in {student.assets}"
                yield f"note: {other}, ids differ: {difference}"
    if not config.checkpoint.keeps_weights:
        return
    if kind == "SentencePieceTokenizer":
        asset = f"note: exports contain {name} as {SENTENCEPIECE_ASSET}, without settings of a tokenizer"
        yield f"{asset}, so transformers may encode text as other ids"
    elif kind == "TiktokenTokenizer":
        yield f"note: exports contain no tokenizer, because transformers cannot read {name}"


def open_own_tokenizer(role: str, teacher: ModelSource, chat: ChatSettings | None = None) -> Tokenizer:
    """Open the tokenizer of a cross-tokenizer teacher. Raises UsageError, which names the teacher."""
    if not has_tokenizer(teacher.assets):
        raise UsageError(
            f"the {role} has no tokenizer in {teacher.assets}",
            "it is compared with the student on the same text (xtoken), which it reads in its own tokens",
            "copy tokenizer.json and tokenizer_config.json of that model into the folder, or, if it has the "
            "student's tokens, remove its xtoken settings",
            code="tokenizer-missing",
        )
    try:
        return open_tokenizer(str(teacher.assets), chat)
    except UsageError as error:
        raise error.located(f"the {role}'s tokenizer") from error


def same_vocabulary_problems(
    tokenizer: Tokenizer, config: Config, role: str, teacher: ModelSource
) -> list[MkdError]:
    """Return the problems of a teacher that reads the ids of `tokenizer`."""
    problems: list[MkdError] = []
    collect_error(problems, lambda: require_same_tokenizer(tokenizer, teacher))
    return problems or list(wider_than_head(tokenizer, config, role, teacher))


def require_same_tokenizer(tokenizer: Tokenizer, teacher: ModelSource) -> None:
    """Raise UsageError for a teacher whose ids mean other strings, because its logits would not match."""
    if not has_tokenizer(teacher.assets):
        return  # bare weights cannot be compared
    difference = tokenizer.vocabulary_difference(load_tokenizer("HuggingFaceTokenizer", str(teacher.assets)))
    if difference is not None:
        raise UsageError(
            f"teacher {teacher.assets} has another tokenizer than the student: {difference}",
            "distillation compares the two models id by id",
            "use a teacher of the same tokenizer, or compare them on aligned text: --xtoken-loss "
            "partition_kl (`xtoken: {}`)",
            code="tokenizers-differ",
        )


def wider_than_head(
    tokenizer: Tokenizer, config: Config, role: str, model: ModelSource
) -> Iterator[UsageError]:
    """Yield a problem if text can have ids beyond the model. Special tokens that no text has may."""
    rows = model.shape.vocab_size
    if tokenizer.vocab_size <= rows:
        return
    used = [i for string, i in tokenizer.vocabulary.items() if string not in tokenizer.special_tokens]
    if config.data.append_eod and tokenizer.eos_id is not None:
        used.append(tokenizer.eos_id)
    if max(used) >= rows:
        what = f"the tokenizer's ids go up to {max(used)}, those of the {role} ({model.assets}) to {rows - 1}"
        why = "text would become ids for which the model has no embedding"
        do = f"use the {role}'s own tokenizer (--tokenizer-model), or a model that was resized for this one"
        yield UsageError(what, why, do, code="tokenizer-of-another-model")


def data_problems(
    paths: Mapping[str, str],
    tokenizers: Tokenizers | None,
    config: Config,
    wanted: WantedRecords,
    roles: Sequence[str] = (),  # of the teachers with tokenizers
) -> list[MkdError]:
    """Return the errors of all corpora (path -> flag): missing, unknown kind, empty, damaged, other ids.

    Also report tokenizers without a chat template for conversations, or without an EOS to end documents.
    """
    problems: list[MkdError] = []
    kinds: set[str] = set()
    rules = TagRules.of(config)
    for path, flag in paths.items():
        max_bad_records = config.data.max_bad_records
        read = partial(_kinds_in, flag, path, tokenizers, max_bad_records, wanted, rules)
        found = collect_error(problems, read)
        kinds |= found or set()
        if found:
            plain = {PAIR if one == CONVERSATION_PAIR else one for one in found}
            collect_error(problems, partial(require_pairs, plain, wanted.pairs, f"{flag} {path}"))
        if found and found & CONVERSATIONS and tokenizers is not None and not max_bad_records:
            problems += _template_problems(f"{flag} {path}", tokenizers, ("student", *roles))
    if tokenizers is not None and config.data.append_eod and kinds - WITHOUT_EOS:
        collect_error(problems, lambda: require_eos(tokenizers.student))
    return problems


def _kinds_in(
    flag: str,
    path: str,
    tokenizers: Tokenizers | None,
    max_bad_records: int,
    wanted: WantedRecords,
    rules: TagRules | None,
) -> set[str]:
    """Return the kinds of a corpus's first records; an empty set if it is tokenised. Raises DataError."""
    if is_raw(path):
        return kinds_of_records(flag, path, max_bad_records, wanted)
    if Path(path).is_file() and Path(path).suffix not in CORPUS_SUFFIXES:
        what = f"{flag} {path}: {Path(path).suffix or 'a name without a suffix'} is not a known kind of file"
        do = f"use one of {KNOWN_FILES}, or the prefix of a .bin/.idx pair"
        raise DataError(what, "the suffix says how a file is read", do, code="data-file-kind-unknown")
    store = TokenStore(find_prefix(path, flag))
    require_numbers(store, wanted, f"{flag} {path}")
    if rules is not None:
        require_tag_key(store, rules, path)
    require_records(wanted, f"{flag} {path}")
    if tokenizers is not None:
        require_vocabulary(store, tokenizers.student, f"{flag} {path}")
        if any(tokenizers.teachers):
            require_text(store, f"{flag} {path}")
    return set()


def _template_problems(corpus: str, tokenizers: Tokenizers, roles: Sequence[str]) -> Iterator[DataError]:
    """Yield one problem for every model that must read conversations but cannot."""
    for role, tokenizer in zip(roles, (tokenizers.student, *tokenizers.teachers), strict=False):
        if tokenizer is not None and not tokenizer.has_chat_template:
            yield DataError(
                f"the {role}'s tokenizer has no chat template",
                f"{corpus} has conversations, which the template turns into tokens",
                "put the chat_template of its instruction-tuned version into tokenizer_config.json"
                + (", or name a tokenizer that has one: --tokenizer-model" if role == "student" else ""),
                code="chat-template-missing",
            )
