"""Tokenised corpora: the place of one, and whether a run can read it."""

from __future__ import annotations

from mkd.config.data_files import CORPUS_SUFFIXES, KNOWN_FILES, not_found
from mkd.data.corpus.store import StoreFiles, TokenStore
from mkd.data.images.conversation import ConversationImages
from mkd.errors import DataError
from mkd.tokenizers.tokenizer import Tokenizer


def find_prefix(path: str, flag: str = "--data-path") -> str:
    """Return the prefix of the tokenised corpus at `path` (with or without .bin).

    Raises DataError, which lists the paths tried, if there is none.
    """
    candidates = [path, *(path.removesuffix(end) for end in CORPUS_SUFFIXES if path.endswith(end))]
    for prefix in candidates:
        files = StoreFiles(prefix)
        if files.bin.is_file() and files.idx.is_file():
            return prefix
        if files.bin.is_file() or files.idx.is_file():
            there, missing = (files.bin, files.idx) if files.bin.is_file() else (files.idx, files.bin)
            raise DataError(
                f"{flag} {path}: {missing} is missing",
                f"{there} is there, and a corpus is the pair of both",
                "copy the missing file too, or make the pair again with `mkd preprocess`",
                code="corpus-damaged",
            )
    looked_for = ", ".join(f"{prefix}.bin with {prefix}.idx" for prefix in candidates)
    raise not_found(path, flag, f"{looked_for}; files of records end in {KNOWN_FILES}")


def require_vocabulary(store: TokenStore, tokenizer: Tokenizer, name: str) -> None:
    """Raise DataError if the corpus, called `name`, is known to come from another tokenizer."""
    known = store.meta.get("vocabulary_fingerprint", tokenizer.vocabulary_fingerprint)
    if known != tokenizer.vocabulary_fingerprint:
        raise DataError(
            f"{name} was tokenised with another tokenizer",
            f"{store.prefix}.meta.json describes another vocabulary, so the ids mean other strings",
            "tokenise the raw files with this run's tokenizer: `mkd preprocess`",
            code="corpus-of-another-model",
        )


def require_text(store: TokenStore, name: str) -> None:
    """Raise DataError if the corpus, called `name`, holds conversations.

    No cross-tokenizer teacher can read them from tokens: they are in the student's chat template.
    """
    if "messages" in store.meta.get("kinds", ()):
        raise DataError(
            f"{name} is a tokenised corpus of conversations, and a teacher has another tokenizer",
            "the conversations are in the student's chat template, "
            "and this teacher was trained on another one",
            "name the raw file of the conversations instead: each model then reads them in its own template",
            code="corpus-of-another-model",
        )


def require_image_processor(store: TokenStore, images: ConversationImages | None, name: str) -> None:
    """Raise DataError if the corpus, called `name`, has images that the models would see in another form."""
    if store.images is None:
        return
    if images is None:
        raise DataError(
            f"{name} has images, and a model of this run reads none",
            "it would read empty places in the text",
            "use vision-language models, or a corpus of texts",
            code="images-not-read",
        )
    known = store.meta.get("image_processor_fingerprint", images.processor.fingerprint)
    if known != images.processor.fingerprint:
        raise DataError(
            f"{name} was tokenised with another image processor, or another --max-image-side",
            f"{store.prefix}.meta.json describes other settings, so images have other numbers of tokens",
            "tokenise the raw files with this run's model and flags: `mkd preprocess`",
            code="corpus-of-another-model",
        )
