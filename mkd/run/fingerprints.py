"""What decides the training of a run besides its weights, by name: saved with every checkpoint, compared at --load."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mkd.config.options import FIRST_TEACHER, all_options, settings
from mkd.config.schema import Config
from mkd.data.sources import parse_blend
from mkd.data.store import StoreFiles, TokenStore, sha256_of_file
from mkd.errors import CheckpointError, UsageError
from mkd.run.model_source import ModelSource
from mkd.run.run_plan import Plan
from mkd.tokenizers.tokenizer import Tokenizer

END_BYTES = 1 << 20  # read at the beginning and at the end of a large file
SAMPLES, SAMPLE_BYTES = (
    64,
    1 << 16,
)  # read of the tokens of a corpus without description, evenly spaced: 4 MiB
HEADER_LENGTH = struct.Struct("<Q")  # of a safetensors file
MAX_HEADER_BYTES = 100 << 20
NOT_LOSS = frozenset({"kd_fp32_logits"})  # how it is computed
NOT_OF_TEACHER = frozenset({"hf", "load", "topk", "pipeline_layout", "residency"})  # where it lies and runs
NOT_CONTENT = (
    "sources",
    "kinds",
)  # of a corpus' description: where it came from, and what its hashes tell better
TEACHER, FILES, CONTENT, STORED_K = "teacher.", "data.files", "data.content", "loss.stored_k"


def fingerprints(plan: Plan, tokenizer: Tokenizer, train_set) -> dict[str, object]:
    """Name -> value (JSON), of teachers, tokenizer, data and loss. Reads a few MiB of every file of weights or tokens."""
    stores = [member.store for member in train_set.members]
    found = {
        TEACHER + name: _weights(source)
        for name, source in zip(plan.teacher_names, plan.teachers, strict=False)
    }
    if plan.stored_teacher is not None:
        found |= {TEACHER + name: plan.stored_teacher.meta.weights_fingerprint for name in plan.teacher_names}
        found[STORED_K] = plan.stored_teacher.meta.k
    found["tokenizer"] = tokenizer.fingerprint
    found[FILES] = _sha256([_corpus(store) for store in stores])
    if not all(store.meta for store in stores):  # a description has hashes of all files
        found[CONTENT] = _sha256(
            [corpus_sample(StoreFiles(store.prefix)) for store in stores if not store.meta]
        )
    return json.loads(
        json.dumps(found | dict(_data(plan.config)) | dict(_loss(plan.config)))
    )  # as it comes back


def evaluation_print(plan: Plan, known: Mapping[str, object], valid_set) -> str | None:
    """Of what held-out figures depend on besides the student: teachers, loss, the packs that are read; None without any.

    `known` are the `fingerprints` of the run.
    """
    if valid_set is None:
        return None
    packs = min(len(valid_set), plan.config.training.eval_iters * plan.batch.global_batch_size)
    members = [_corpus(member.store) for member in valid_set.members]
    teachers = [
        value for name, value in known.items() if name.startswith(TEACHER)
    ]  # whatever they are called
    others = {
        name: known[name]
        for name in known
        if not name.startswith((TEACHER, "data.")) and name != "loss.kd_ratio"
    }
    packs_read = [members, valid_set.weights, packs, plan.config.training.seq_length, plan.config.data.split]
    return _sha256([teachers, others, *packs_read])


def require_same(
    folder: Path, saved: Mapping[str, object], current: Mapping[str, object], accepted: Sequence[str]
) -> None:
    """Raise CheckpointError, with every difference by name, unless all of them are accepted.

    Names have parts (`data.seq_length`); accepting `data` accepts all of its parts. A teacher may have another name, where
    the one at its place had the same weights. What a checkpoint of an older version lacks, all of them or
    an option that was not there yet, is taken as it was then.
    """
    if not saved:
        return
    saved = _as_now(saved, current)
    unknown = [
        one for one in accepted if not any(_is_part(name, one) for name in saved.keys() | current.keys())
    ]
    if unknown:
        parts = ", ".join(sorted({name.split(".")[0] for name in current}))
        raise UsageError(
            f"--accept-change {unknown[0]} names nothing that is compared",
            f"that is {parts}",
            "drop it",
            code="accept-change-unknown",
        )
    changed = [name for name in sorted(saved.keys() | current.keys()) if saved.get(name) != current.get(name)]
    refused = [name for name in changed if not any(_is_part(name, one) for one in accepted)]
    if refused:
        raise CheckpointError(
            f"{folder} was saved by a run with other "
            + ", ".join(_difference(name, saved, current) for name in refused),
            "going on would silently mix two different trainings",
            f"restore it, start anew with --student-load {folder}, or go on with --accept-change {' '.join(refused)}",
            code="run-differs",
        )


def _is_part(name: str, accepted: str) -> bool:
    return name == accepted or name.startswith(accepted + ".")


def corpus_sample(files: StoreFiles) -> list[str]:
    """SHA-256 of the index, and of `SAMPLES` evenly spaced pieces of the tokens, `SAMPLE_BYTES` each, the last ones among them.

    Of a larger file than the pieces together, a change between them that leaves all lengths is not seen.
    """
    size, digest = files.bin.stat().st_size, hashlib.sha256()
    last = max(0, size - SAMPLE_BYTES)
    with files.bin.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(last * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return [sha256_of_file(files.idx), digest.hexdigest()]


def ends_fingerprint(files: Iterable[Path]) -> str:
    """`ends-sha256:...` over name, size, safetensors header, first and last MiB of each file.

    Cheap, and so named: a change in the middle of a file that leaves its size is not seen.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with open(path, "rb") as file:
            first = END_BYTES
            if path.suffix == ".safetensors" and size >= HEADER_LENGTH.size:
                (length,) = HEADER_LENGTH.unpack(file.read(HEADER_LENGTH.size))
                first = max(first, HEADER_LENGTH.size + min(length, MAX_HEADER_BYTES))
            file.seek(0)
            digest.update(file.read(first))
            file.seek(max(first, size - END_BYTES))
            digest.update(file.read(END_BYTES))
    return f"ends-sha256:{digest.hexdigest()}"


def _weights(source: ModelSource) -> str:
    if source.hf is None:
        files = sorted(path for path in source.load.iterdir() if path.is_file())
    else:
        files = [
            source.hf.directory / name
            for name in sorted({header.file for header in source.hf.headers.values()})
        ]
    return ends_fingerprint([source.assets / "config.json", *files])


def _as_now(saved: Mapping[str, object], current: Mapping[str, object]) -> dict[str, object]:
    """`saved` under the names that its teachers have now, with what it could not know yet."""
    teachers = ([name for name in prints if name.startswith(TEACHER)] for prints in (saved, current))
    names = {then: now for then, now in zip(*teachers, strict=False) if saved[then] == current[now]}
    options = {
        option.path: option for option in all_options() if option.path.startswith(("kd.", FIRST_TEACHER))
    }
    later = {name: options.get(_option_path(name)) for name in current.keys() - saved.keys()}
    known = {
        name: json.loads(json.dumps(option.default)) for name, option in later.items() if option is not None
    }
    if saved.get(FILES) == _sha256([]):  # what runs with a stored teacher were once said to have
        saved = dict(saved) | {name: current[name] for name in (FILES, STORED_K) if name in current}
    if CONTENT in current:
        known[CONTENT] = current[CONTENT]
    return known | {names.get(name, name): value for name, value in saved.items()}


def _option_path(name: str) -> str:
    """Of a name of `_loss`; options of teachers are described by the first."""
    field = name.removeprefix("loss.")
    return (
        re.sub(r"^teachers\[\d+\]", FIRST_TEACHER, field) if field.startswith("teachers[") else f"kd.{field}"
    )


def _corpus(store: TokenStore) -> dict:
    """Sizes of the files, and what its description says of the contents."""
    files = StoreFiles(store.prefix)
    sizes = [path.stat().st_size for path in (files.bin, files.idx, files.loss_mask) if path.exists()]
    return {
        "sizes": sizes,
        "meta": {name: value for name, value in store.meta.items() if name not in NOT_CONTENT},
    }


def _data(config: Config) -> Iterator[tuple[str, object]]:
    """The settings that decide the order of samples."""
    values = {"seq_length": config.training.seq_length, "seed": config.training.seed}
    values["weights"] = parse_blend(config.data.data_path).weights
    values |= {
        name: getattr(config.data, name) for name in ("split", "pack", "overlong", "append_eod", "shuffle")
    }
    for name, value in values.items():
        yield f"data.{name}", value


def _loss(config: Config) -> Iterator[tuple[str, object]]:
    for option, value in settings(config):
        if option.path.startswith("kd.") and option.field not in NOT_LOSS:
            yield f"loss.{option.field}", value
        elif option.path.startswith("teachers[") and option.field not in NOT_OF_TEACHER:
            yield f"loss.{option.path}", value


def _sha256(content: object) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _difference(name: str, saved: Mapping[str, object], current: Mapping[str, object]) -> str:
    return f"{name} ({_short(saved.get(name))} then, {_short(current.get(name))} now)"


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    kind, colon, digest = text.rpartition(":")
    return kind + colon + digest[:12] if len(digest) == 64 else text
