"""Open the transformers tokenizer of a folder so that it gives the ids of the folder's own files.

transformers rebuilds some tokenizers from the vocabulary alone, by the class that it chooses for a folder. A
tokenizer.json with another pre-tokenizer then silently gives other ids. People train and serve with
tokenizer.json, so that file decides here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import RemoteEntryNotFoundError
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as Backend
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast, __version__
from transformers.utils import cached_file

from mkd.errors import UsageError
from mkd.tokenizers.kimi import RANKS_FILE, is_kimi, load_kimi

LOG = logging.getLogger("mkd")
TOKENIZER_JSON = "tokenizer.json"
CONFIG_FILE, MODEL_CONFIG = "tokenizer_config.json", "config.json"
PIECES_FILE = "tokenizer.model"
TOKENIZER_FILES = (TOKENIZER_JSON, PIECES_FILE, "vocab.json", "vocab.txt", RANKS_FILE)
WRITE_JSON = (
    "write a tokenizer.json for it (AutoTokenizer.from_pretrained(DIR, trust_remote_code=True)"
    ".save_pretrained(DIR) of transformers runs the folder's code), or copy that of a model of its family"
)
OTHER_FILES = ("*.tiktoken", "tekken.json", "*.model", "*.vocab", "merges.txt", "tokenization_*.py")
"""Files of tokenizers that mkd does not read by themselves."""
PARTS = ("normalizer", "pre_tokenizer", "decoder")
SHOWN = 80  # characters of an example
OWN_TOKENS = 3000  # tokens of the vocabulary that are compared, each as a text
TEXTS = (
    "The quick brown fox didn't jump over 12345 lazy dogs in 2024; DON'T ask why.",
    "  two  leading blanks, trailing blanks   \n\n\tand tabs\r\n  lines \n",
    "def f(x_1, *args):\n    return {'a': x_1 ** 2, \"b\": [0.5, -3e-8]}  # HelloWorld snake_case\n",
    "caf\u00e9 cafe\u0301 \ufb01ne \u2019quoted\u2019 \u4f60\u597d\u4e16\u754c \u65e5\u672c\u8a9e\u306e ",
    "\ud55c\uad6d\uc5b4 \u0e01\u0e33\u0e25\u0e31\u0e07 \u0627\u0644\u0639 \u0661\u0662 \U0001f600",
    "https://example.com/a?b=c&d=%20e #tag @name (parentheses) <html> a\u00a0b \u3000c",
)


def has_tokenizer(folder: str | Path) -> bool:
    """Return True if a model's folder holds a tokenizer; if not, transformers would make up an empty one."""
    return any((Path(folder) / name).exists() for name in TOKENIZER_FILES)


def no_tokenizer(folder: str) -> UsageError:
    """Return the error for a folder without tokenizer files that mkd reads."""
    others = sorted(path.name for pattern in OTHER_FILES for path in Path(folder).glob(pattern))
    why = f"none of {', '.join(TOKENIZER_FILES)} is there"
    do = "copy the tokenizer's files into the folder"
    if others:
        why += f". {' and '.join(others)} may belong to one, which mkd does not read"
        do = WRITE_JSON
    return UsageError(f"{folder} holds no tokenizer", why, do, code="tokenizer-missing")


def _ask_hub(model: str) -> None:
    """Raise what the hub's library raises if it cannot be asked for a tokenizer that is not in its cache.

    On a machine without network transformers would try again for about a minute, and then say less.
    """
    if any(try_to_load_from_cache(model, name) for name in (CONFIG_FILE, TOKENIZER_JSON, MODEL_CONFIG)):
        return
    with suppress(RemoteEntryNotFoundError):
        get_hf_file_metadata(hf_hub_url(model, CONFIG_FILE))


def open_hf(model: str) -> tuple[Any, bool]:
    """Return the tokenizer of a folder or a hub id, which gives the ids of its tokenizer.json.

    Return True with it if transformers by itself would make another one.

    Raises UsageError for a folder of Kimi that cannot be read, and whatever transformers raises.
    """
    if not Path(model).exists():
        _ask_hub(model)
    if is_kimi(model):
        return load_kimi(model), False
    try:
        hf = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception
        own = _of_the_file(model, own_code(error) or in_one_line(error))
        if own is None:
            raise
        return own, True
    path = model_file(model, TOKENIZER_JSON)
    if not hf.is_fast:
        own = _of_the_file(model, f"{type(hf).__name__} does not read it")
        return (hf, False) if own is None else (own, True)
    if path is None:
        compare_with_sentencepiece(hf, Path(model) / PIECES_FILE)
        return hf, False
    example = first_difference(hf, path)
    if example is None:
        return hf, False
    note_once(
        f"note: mkd uses {path} as it is. transformers {__version__} would replace its "
        f"{' and '.join(replaced_parts(hf, path))} ({type(hf).__name__}), and {example}"
    )
    own = PreTrainedTokenizerFast.from_pretrained(model)
    own.chat_template = hf.chat_template
    return own, True


def _of_the_file(model: str, why: str) -> Any | None:
    """Return the tokenizer of a tokenizer.json, which the class that transformers takes for it cannot read.

    Return None if there is no such file, if it cannot be read, or if config.json is at fault.
    """
    path = model_file(model, TOKENIZER_JSON)
    if path is None or config_refusal(model) is not None:
        return None
    try:
        own = PreTrainedTokenizerFast.from_pretrained(model)
    except Exception:  # the tokenizers library raises bare Exception; the caller has the first error
        return None
    note_once(
        f"note: mkd uses {path} as it is. The class that {CONFIG_FILE} or {MODEL_CONFIG} names cannot read "
        f'it: {why}. Exports have "tokenizer_class": "PreTrainedTokenizerFast"; set it here for others'
    )
    return own


def config_refusal(model: str) -> Exception | None:
    """Return why transformers refuses the config.json of a folder; None if it does not, or there is none."""
    if not (Path(model) / MODEL_CONFIG).is_file():
        return None
    try:
        AutoConfig.from_pretrained(model, trust_remote_code=False, local_files_only=True)
    except Exception as refusal:  # some checks of transformers raise errors of their own classes
        return refusal
    return None


def own_code(error: Exception) -> str:
    """Return a text if transformers would need to run code of the folder; else ""."""
    needs_code = "trust_remote_code" in str(error)
    return "its tokenizer is code of its own, which is not run" if needs_code else ""


def in_one_line(error: Exception) -> str:
    """Return class and text of an error, cut to one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300] or 'no details'}"


def rebuilt_example(folder: str) -> str | None:
    """Return an example of what AutoTokenizer does with a folder that its tokenizer.json does not say.

    Return None if there is none, if the folder has no tokenizer.json, or if AutoTokenizer cannot read it
    without running the folder's code.
    """
    path = model_file(folder, TOKENIZER_JSON)
    try:
        hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return None if path is None else first_difference(hf, path)
    except Exception:  # the tokenizers library raises bare Exception; whoever reads the folder says more
        return None


def warn_of_export(folder: str) -> None:
    """Log a warning if transformers makes another tokenizer of a written folder than its tokenizer.json.

    It does so for some model types, whatever class tokenizer_config.json names.
    """
    example = rebuilt_example(folder)
    if example is not None:
        LOG.warning(
            f"transformers {__version__}: AutoTokenizer does not read {folder}/{TOKENIZER_JSON} as it is: it "
            f"would {example}. Use PreTrainedTokenizerFast.from_pretrained, or give it and servers "
            "(vLLM: --tokenizer) a folder with tokenizer.json and tokenizer_config.json but no config.json"
        )


@cache
def note_once(text: str) -> None:
    """Log `text`, the first time only: a run opens its tokenizers more than once."""
    LOG.warning(text)


def compare_with_sentencepiece(hf: Any, file: Path) -> None:
    """Log a note if `hf`, which transformers made from a SentencePiece file, encodes text in another way."""
    try:
        pieces = SentencePieceProcessor(model_file=str(file))
    except (OSError, RuntimeError):  # no such file, or not a SentencePiece model
        return
    for text in TEXTS:
        own, made = pieces.encode(text), hf.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if own != made:
            other, right = (_example(hf.backend_tokenizer, *pair) for pair in ((made, own), (own, made)))
            note_once(
                f"note: transformers {__version__} does not read {file} as SentencePiece does: it encodes "
                f"text as {other} instead of {right}. To train with SentencePiece's ids, give a "
                "tokenizer.json that has them, or --tokenizer-type SentencePieceTokenizer"
            )
            return


def model_file(model: str, name: str) -> str | None:
    """Return the path of a file of a folder, or of a hub id, which may download it; None if it has none."""
    if Path(model).is_dir():
        path = Path(model) / name
        return str(path) if path.is_file() else None
    missing = dict.fromkeys(
        (f"_raise_exceptions_for_{of}" for of in ("missing_entries", "connection_errors", "gated_repo")),
        False,
    )
    found: str | None = cached_file(model, name, **missing)
    return found


def first_difference(hf: Any, path: str) -> str | None:
    """Return an example of text that `hf` encodes or decodes in another way than its tokenizer.json.

    Compare behaviour, because settings that are written in another way may do the same. A tokenizer of the
    general class is read from the file as it is.
    """
    if type(hf) is PreTrainedTokenizerFast:
        return None
    own, loaded = Backend.from_file(path), hf.backend_tokenizer
    own.no_truncation()
    own.no_padding()
    loaded.no_truncation()
    loaded.no_padding()
    for text in _probes(own):
        for whole in (True, False):
            here, there = (one.encode(text, add_special_tokens=whole).ids for one in (own, loaded))
            if here != there:
                return (
                    f"encode text as {_example(loaded, there, here)} instead of {_example(own, here, there)}"
                )
        texts = [one.decode(here, skip_special_tokens=False) for one in (own, loaded)]
        if texts[0] != texts[1]:
            return f"decode ids as {texts[1][:SHOWN]!r} instead of {texts[0][:SHOWN]!r}"
    return None


def _probes(own: Backend) -> Iterator[str]:
    """Yield texts that tell one tokenizer from another: any text, control tokens in it, and own tokens."""
    yield from TEXTS
    added = [token.content for token in own.get_added_tokens_decoder().values()]
    yield from (f"a{token} b{token}\n{token}c" for token in added[:64])
    size = own.get_vocab_size(with_added_tokens=False)
    texts = (own.decode([i], skip_special_tokens=False) for i in range(0, size, size // OWN_TOKENS + 1))
    yield from islice((text for text in texts if len(text) > 1), OWN_TOKENS)


def replaced_parts(hf: Any, path: str) -> list[str]:
    """Return the names of the parts of tokenizer.json that `hf` has otherwise."""
    here = json.loads(Backend.from_file(path).to_str())
    there = json.loads(hf.backend_tokenizer.to_str())
    return [name for name in PARTS if here[name] != there[name]] or ["post_processor or model"]


def _example(backend: Backend, ids: list[int], others: list[int]) -> str:
    """Return the tokens of `ids` from the first one on that differs from `others`."""
    start = next((i for i, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other), 0)
    return str([backend.decode([i], skip_special_tokens=False) for i in ids[start : start + 6]])[:SHOWN]
