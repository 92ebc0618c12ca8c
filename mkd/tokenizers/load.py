"""The tokenizer that a flag or a path names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mkd.errors import UsageError
from mkd.tokenizers.chat_input import ChatSettings
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer, load_hugging_face, require_fast
from mkd.tokenizers.sentencepiece import load_sentencepiece
from mkd.tokenizers.tiktoken import load_tiktoken
from mkd.tokenizers.tokenizer import Tokenizer


def load_tokenizer(tokenizer_type: str, tokenizer_model: str, chat: ChatSettings | None = None) -> Tokenizer:
    """Load the tokenizer of `--tokenizer-type` and `--tokenizer-model`; `chat`: how it reads conversations.

    The model is a local folder, a Hugging Face id, a `.model` or a `.tiktoken` file. Code that comes with a
    model is never run. Raises UsageError if the tokenizer cannot be loaded, or lacks marks that `chat` wants.
    """
    loaders: Mapping[str, Callable[[str], Tokenizer]] = {
        "HuggingFaceTokenizer": lambda model: load_hugging_face(model, chat),
        "SentencePieceTokenizer": load_sentencepiece,
        "TiktokenTokenizer": load_tiktoken,
    }
    if tokenizer_type not in loaders:
        what, do = f"--tokenizer-type {tokenizer_type} is not known", f"use one of {', '.join(loaders)}"
        raise UsageError(what, do=do, code="value-unknown")
    try:
        tokenizer = loaders[tokenizer_type](tokenizer_model)
    except UsageError as error:
        if error.code == "tokenizer-missing":
            error.do += ", or name another one with --tokenizer-model"
        raise
    require_marks(tokenizer, tokenizer_model, chat)
    return tokenizer


def require_marks(tokenizer: Tokenizer, name: str, chat: ChatSettings | None) -> None:
    """Raise UsageError if `chat` wants marks, and no chat template of the tokenizer `name` has any."""
    wants_marks = chat is not None and chat.loss == "marks" and tokenizer.has_chat_template
    if wants_marks and not tokenizer.has_chat_marks:
        raise UsageError(
            f"--chat-loss marks: the chat template of {name} has no {{% generation %}} marks",
            "no token of its conversations would have loss",
            "add marks to the template, or use --chat-loss turns",
            code="chat-template-without-marks",
        )


def open_tokenizer(
    source: Tokenizer | PreTrainedTokenizerBase | str | Path, chat: ChatSettings | None = None
) -> Tokenizer:
    """Return the tokenizer `source`, or wrap a fast transformers tokenizer, or load a path or hub id.

    The kind of a path is told by its name. Raises UsageError if it cannot be loaded or is not a fast
    tokenizer.
    """
    if isinstance(source, Tokenizer):
        return source
    if isinstance(source, PreTrainedTokenizerBase):
        return HuggingFaceTokenizer(require_fast(source, type(source).__name__), chat)
    path = Path(source)
    if path.suffix == ".tiktoken":
        return load_tiktoken(str(path))
    if path.is_file() and ".model" in path.name:  # published names end with .model, .model.v1, ...
        return load_sentencepiece(str(path))
    return load_hugging_face(str(source), chat)
