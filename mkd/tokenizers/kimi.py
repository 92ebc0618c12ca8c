"""Kimi's and Moonlight's tokenizers: `tiktoken.model` with the settings in tokenizer_config.json.

Their folders have code of their own instead of a tokenizer.json. Nothing of it is run: the ranks become
byte-level BPE of the tokenizers library, with the pattern of that code. Source of pattern and reserved ids:
moonshotai's tokenization_moonshot.py and tokenization_kimi.py, which agree.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mkd.errors import UsageError
from mkd.tokenizers.pieces import characters_of_bytes

RANKS_FILE = "tiktoken.model"
CLASS = "TikTokenTokenizer"
RESERVED_IDS = 256  # behind the ranks; tokenizer_config.json names some of them
_LETTERS = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]*[\p{{Ll}}{_LETTERS}]+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]+[\p{{Ll}}{_LETTERS}]*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
TEMPLATE_FILE = "chat_template.jinja"
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def is_kimi(folder: str | Path) -> bool:
    """Return True if the folder has such a tokenizer and no tokenizer.json."""
    return (Path(folder) / RANKS_FILE).is_file() and not (Path(folder) / "tokenizer.json").is_file()


def load_kimi(folder: str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder. Raises UsageError for another class, and for damaged files."""
    path = Path(folder) / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        name = config.get("tokenizer_class")
        named = {int(i): token for i, token in (config.get("added_tokens_decoder") or {}).items()}
        texts = {i: token["content"] for i, token in named.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise _not_readable(path, str(error)) from error
    if name != CLASS:
        raise UsageError(
            f"{folder} has {RANKS_FILE}, and its tokenizer_class is {name!r}",
            f"the ranks do not say how text is split into words; mkd knows the rule of {CLASS}, Kimi's",
            "write a tokenizer.json: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers",
            code="tokenizer-missing",
        )
    ranks = read_ranks(Path(folder) / RANKS_FILE)
    backend = build_backend(ranks)
    extra = range(len(ranks), max(len(ranks) + RESERVED_IDS, max(texts, default=-1) + 1))
    backend.add_special_tokens(
        [AddedToken(texts.get(i, f"<|reserved_token_{i}|>"), normalized=False, special=True) for i in extra]
    )
    template = Path(folder) / TEMPLATE_FILE
    roles = {role: _text(config[role]) for role in ROLES if config.get(role) is not None}
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=config.get("additional_special_tokens") or [],
        clean_up_tokenization_spaces=False,
        name_or_path=str(folder),
        **roles,
    )
    hf.chat_template = template.read_text("utf-8") if template.is_file() else config.get("chat_template")
    return hf


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a rank file: a token in base64 and its rank a line. The ranks must be 0, 1, 2, ..."""
    ranks = {}
    try:
        for line in path.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise _not_readable(path, str(error)) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise _not_readable(path, "its ranks are not 0, 1, 2, ...")
    return ranks


def build_backend(ranks: Mapping[bytes, int]) -> Backend:
    """Return byte-level BPE that merges as tiktoken does: any two neighbours that are a token together.

    The token of lowest rank comes first. Text that is a token is never split.
    """
    table = characters_of_bytes()
    spelled = {token: "".join(table[byte] for byte in token) for token in ranks}
    merges = [
        (spelled[token[:cut]], spelled[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def _not_readable(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} cannot be read",
        why,
        "download it again, and check that it is not a Git LFS pointer",
        code="tokenizer-file-not-valid",
    )
