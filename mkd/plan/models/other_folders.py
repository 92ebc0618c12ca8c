"""Recognise what a folder that is given as a model holds instead of one, and how a model is made of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from mkd.errors import CheckpointError

HELD = (  # pattern of a file's name -> (the words behind "it holds", what to do)
    ("*.gguf", "a GGUF file of llama.cpp", "use the original checkpoint of this model"),
    (
        "zero_to_fp32.py",
        "a checkpoint of DeepSpeed",
        "python FOLDER/zero_to_fp32.py FOLDER NEW --safe_serialization, then copy config.json and the "
        "tokenizer to NEW",
    ),
    (
        "*.distcp",
        "a distributed checkpoint of torch (FSDP)",
        "accelerate merge-weights FOLDER NEW, then copy config.json and the tokenizer to NEW",
    ),
    (
        "latest_checkpointed_iteration.txt",
        "checkpoints of Megatron",
        "give one of mkd as --student-load or --teacher-load, or write a model of it: mkd export",
    ),
    (
        "consolidated*.safetensors",
        "Mistral's own format",
        "use the files of this model for transformers: config.json with model*.safetensors",
    ),
    (
        "consolidated*.pth",
        "Meta's own format",
        "use the files of this model for transformers: config.json with model*.safetensors",
    ),
    ("flax_model*.msgpack", "weights of Flax", "AutoModelForCausalLM.from_pretrained(DIR, from_flax=True)"),
    (
        "*.safetensors",
        "{name} alone",
        "name it model.safetensors if it has all weights, and put config.json beside it",
    ),
)
MOST_FOLDERS = 1000  # entries that are looked at
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def not_a_model(folder: Path, what: str, why: str) -> CheckpointError:
    """Return the error for a folder without config.json, or without weights: `what` says which of them."""
    inside = sorted(_models_in(folder), key=_natural)
    do = "pass the folder that save_pretrained() or a hub download made"
    if inside:
        more = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
        why, do = f"models are in folders of it: {inside[-1]}{more}", f"name one of them: {inside[-1]}"
    else:
        for pattern, held, remedy in HELD:
            name = next((path.name for path in sorted(folder.glob(pattern))), None)
            if name is not None:
                why, do = f"it holds {held.format(name=name)}", remedy.replace("FOLDER", str(folder))
                break
    return CheckpointError(what, why, do, code="hf-weights-missing")


def _models_in(folder: Path) -> Iterator[Path]:
    """Yield models in the folder, where trainers (checkpoint-500) and the hub's cache put them."""
    for pattern in ("*/config.json", "snapshots/*/config.json"):
        for path in islice(folder.glob(pattern), MOST_FOLDERS):
            if any((path.parent / name).exists() for name in WEIGHTS):
                yield path.parent


def _natural(path: Path) -> list[int | str]:
    """Return a key that sorts checkpoint-500 before checkpoint-1000."""
    parts = re.split(r"(\d+)", str(path))
    return [int(part) if part.isdigit() else part for part in parts]
