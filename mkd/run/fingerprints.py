"""Identify a run: saved with every checkpoint, and compared with the run that resumes from it.

Fingerprints, by name, cover everything that decides the training besides the student's weights. They must not
change. Settings may change; on startup a resumed run lists those that differ.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from mkd.checkpoint.adapters import ADAPTERS, BASE, start_anew
from mkd.checkpoint.folders import REPLICAS, SETTINGS
from mkd.config.data_files import parse_blend
from mkd.config.divergence import SKEW_ALPHA
from mkd.config.models import FROZEN
from mkd.config.options import FIRST_TEACHER, all_options, settings
from mkd.config.schema import Config
from mkd.data.corpus.known_files import KnownFiles
from mkd.data.corpus.store import FORGETFUL, StoreFiles, TokenStore
from mkd.data.dataset import later_orders
from mkd.data.prompts import PromptSet
from mkd.errors import CheckpointError, UsageError
from mkd.kinds.apart.apart_settings import ApartSettings
from mkd.kinds.known_kinds import identity
from mkd.kinds.placed.placed_settings import PlaceSettings, PrecisionSettings
from mkd.kinds.stored.topk_setup import STORED_K
from mkd.operations.run_folders import cache_folder
from mkd.plan.models.lora_shape import LoRAShape
from mkd.resolve.chat_setup import CHAT_DATE, date_of
from mkd.resolve.run_plan import Plan
from mkd.run_command import quoted
from mkd.tokenizers.chat_input import ChatSettings
from mkd.tokenizers.tokenizer import Tokenizer

ACCEPTED = "accepted"  # entry of a checkpoint: --accept-change of the run that saved it
MOST_FILES, MOST_NAMED = 2000, 5  # files of the data in a checkpoint, and in an error
# Evenly spaced pieces read from a corpus without a description: 4 MiB.
SAMPLES, SAMPLE_BYTES = 64, 1 << 16
WHICH_ADAPTERS = "student.lora_rank", "student.lora_targets"  # compared names that decide which there are
# Options that older runs lack: at their defaults they do not change the fingerprint.
LATER_OPTIONS: Mapping[str, object] = MappingProxyType(
    {
        "skew_alpha": SKEW_ALPHA.default,
        "tags": [],
        "weights": FROZEN,
        "tag_key": None,
        "tag_weights": [],
        "fallbacks": [],
        "success": 1.0,
        **{field.name: field.default for field in fields(PrecisionSettings)},
    }
)
# Options of how the loss is computed, or whether it may be.
NOT_LOSS = frozenset({"kd_fp32_logits"})
# Where a teacher is stored and runs.
NOT_OF_TEACHER = frozenset(
    {"hf", "load", "topk", "hidden", "pipeline_layout", "expert_model_parallel_size"}
    | {field.name for section in (PlaceSettings, ApartSettings) for field in fields(section)}
)
# Entries of a corpus's description whose meaning its hashes cover, and texts for people.
NOT_CONTENT = ("sources", "kinds", "trained_ends", "chat", "chat_date", "notes", "records_version")
NOT_COMPARED = ("checkpoint", "log", "")  # sections of output folders, and the root
OF_TEACHERS = "loss.teachers["  # settings of teachers
TEACHER, FILES, CONTENT = "teacher.", "data.files", "data.content"
CHAT_LOSS, CHAT_VARIABLES = "chat.loss", "chat.template_kwargs"  # absent in checkpoints of earlier versions
NOT_OF_EVALUATION = ("loss.kd_ratio", CHAT_LOSS, CHAT_VARIABLES)  # the held-out tokens show the last two


def identify_run(
    plan: Plan, tokenizer: Tokenizer, train_set, valid_set, prompts: PromptSet | None = None
) -> dict[str, object]:
    """Return the checkpoint's entries (JSON): fingerprints, settings, evaluation, files and ACCEPTED."""
    known = fingerprints(plan, tokenizer, train_set, prompts)
    evaluation = evaluation_print(plan, known, valid_set)
    found: dict[str, object] = {
        "fingerprints": known,
        SETTINGS: run_settings(plan),
        "evaluation": evaluation,
        "files": training_files(train_set),
        ACCEPTED: list(plan.config.checkpoint.accept_change),
    }
    lora = LoRAShape.of(plan.config)
    if lora is None:
        return found
    student = plan.config.student
    return found | {ADAPTERS: {**asdict(lora), "base": student.load or student.hf}}


def training_files(train_set) -> dict[str, int]:
    """Return path -> bytes of the files that the training corpora were made of, as far as they are known."""
    stores = [member.store for member in train_set.members] if train_set is not None else []
    sources = (one for store in stores for one in store.meta.get("sources", ()))
    return {one["path"]: one["bytes"] for one in islice(sources, MOST_FILES)}


def changed_files(then: Mapping[str, int], now: Mapping[str, int]) -> str:
    """Return which files of the training data were added, removed or changed in size; "" if none were."""
    parts = {
        "added": [path for path in now if path not in then],
        "removed": [path for path in then if path not in now],
        "changed": [path for path in now if path in then and now[path] != then[path]],
    }
    return "; ".join(f"{what}: {_few(paths)}" for what, paths in parts.items() if paths and then)


def _few(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:MOST_NAMED])
    return shown + (f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else "")


def fingerprints(
    plan: Plan, tokenizer: Tokenizer, train_set, prompts: PromptSet | None = None
) -> dict[str, object]:
    """Return name -> value (JSON) for teachers, tokenizer, data and loss. Reads MiBs of each large file."""
    stores = [member.store for member in train_set.members] if train_set is not None else []
    found: dict[str, object] = {TEACHER + one.name: one.fingerprint() for one in plan.setups}
    for one in plan.setups:
        found |= one.fingerprints(plan.config, plan.tokenizers)
    found["tokenizer"] = tokenizer.fingerprint
    if plan.config.lora.is_on:  # a checkpoint holds the adapters alone
        found[BASE] = plan.student.base_fingerprint()
    found |= _chat(plan, tokenizer, stores, prompts)
    found[FILES] = _sha256([_corpus(store) for store in stores])
    if not all(store.meta for store in stores):  # a description contains the hashes of all files
        known = KnownFiles(cache_folder(plan.config))
        found[CONTENT] = _sha256(
            [corpus_sample(StoreFiles(store.prefix), known) for store in stores if not store.meta]
        )
    if train_set is not None:
        found |= {f"data.{name}": value for name, value in later_orders(train_set).items()}
    if prompts is not None:
        found["rollout.prompts"] = prompts.fingerprint
    # The values as a checkpoint returns them.
    config = plan.config
    found |= dict(_data(config)) | dict(_loss(config)) | identity(config)
    return json.loads(json.dumps(found))


def _chat(
    plan: Plan, tokenizer: Tokenizer, stores: Sequence[TokenStore], prompts: PromptSet | None
) -> dict[str, object]:
    """Return the settings of conversations, if the run itself makes tokens of records or prompts with them.

    The tokens have fingerprints too. These entries only give a difference its name.
    """
    tokenizers = plan.tokenizers.opened if plan.tokenizers else [tokenizer]
    date = date_of(tokenizers)
    found: dict[str, object] = {CHAT_DATE: date} if date else {}
    if not any(one.has_chat_template for one in tokenizers):
        return found
    data = plan.config.data
    settings = ChatSettings.from_flags(data.chat_loss, data.chat_template_kwargs, None)
    makes_tokens = any(store.meta.get("cache_key") for store in stores)
    if makes_tokens:
        found[CHAT_LOSS] = settings.loss
    if makes_tokens or prompts is not None:
        found[CHAT_VARIABLES] = json.dumps(settings.template_kwargs, sort_keys=True)
    return found


def evaluation_print(plan: Plan, known: Mapping[str, object], valid_set) -> str | None:
    """Return the fingerprint of everything besides the student that held-out metrics depend on.

    It covers teachers, loss and the packs read; None without held-out data. `known` are the `fingerprints` of
    the run.
    """
    if valid_set is None:
        return None
    packs = min(len(valid_set), plan.config.training.eval_iters * plan.batch.global_batch_size)
    members = [_corpus(member.store) for member in valid_set.members]
    # Without the teachers' names.
    teachers = [value for name, value in known.items() if name.startswith(TEACHER)]
    others = {
        name: known[name]
        for name in known
        if not name.startswith((TEACHER, "data.", "student.")) and name not in NOT_OF_EVALUATION
        if not _is_as_before(name, known[name])
    }
    packs_read = [members, valid_set.weights, packs, plan.config.training.seq_length, plan.config.data.split]
    return _sha256([teachers, others, *packs_read, *sorted(later_orders(valid_set).items())])


def _is_as_before(name: str, value: object) -> bool:
    """Return True for the default of an option that older runs lack."""
    return any(name.endswith(option) and value in (None, old) for option, old in LATER_OPTIONS.items())


def require_same(
    folder: Path,
    saved: Mapping[str, object],
    current: Mapping[str, object],
    accepted: Sequence[str],
    files: str = "",  # see `changed_files`
    accepted_before: Sequence[str] = (),  # by the run that saved the checkpoint
) -> None:
    """Raise CheckpointError, with every difference by name, unless all differences are accepted.

    Names have parts (`data.seq_length`); accepting `data` accepts all of its parts. A teacher may have
    another name if the teacher at its place had the same weights. A checkpoint of an older version may lack
    all fingerprints, or those of later options, which then had their defaults. The same command starts again
    after a stop: what it accepts may then be gone from both sides.
    """
    if not saved:
        return
    saved = _as_now(saved, current)
    names = sorted(saved.keys() | current.keys())
    known = [*names, *accepted_before]
    unknown = [one for one in accepted if not any(_is_part(name, one) for name in known)]
    if unknown:
        parts = ", ".join(sorted({name.split(".")[0] for name in current}))
        what = f"--accept-change {unknown[0]} names nothing that is compared"
        raise UsageError(what, f"compared are {parts}", "drop it", code="remove-flag")
    changed = [name for name in names if saved.get(name) != current.get(name)]
    _require_same_adapters(folder, saved, current, changed)
    refused = [name for name in changed if not any(_is_part(name, one) for one in accepted)]
    if refused:
        differences = ", ".join(
            f"{name} ({_short(saved.get(name))} then, {_short(current.get(name))} now)" for name in refused
        )
        raise CheckpointError(
            f"{folder} was saved by a run with other {differences}",
            "resuming would silently mix two different trainings"
            + (f"; files of the data {files}" if files and FILES in refused else ""),
            f"restore it, {start_anew(folder)}, or resume with --accept-change "
            + " ".join(map(quoted, refused)),
            code="run-differs",
        )


def _require_same_adapters(
    folder: Path, saved: Mapping[str, object], current: Mapping[str, object], changed: Sequence[str]
) -> None:
    """Raise CheckpointError if the run has other adapters than the checkpoint, which nothing can accept.

    Fewer targets would leave out what the others have learned; other ranks do not fit.
    """
    other = [name for name in WHICH_ADAPTERS if name in changed]
    if other:
        then = ", ".join(
            f"{name} {_shown(saved.get(name))} then, {_shown(current.get(name))} now" for name in other
        )
        raise CheckpointError(
            f"{folder} was saved by a run with other adapters: {then}",
            "the learned adapters would be left out, or do not fit",
            f"restore --lora-rank and --lora-targets, or {start_anew(folder)}",
            code="run-differs",
        )


def run_settings(plan: Plan) -> dict[str, object]:
    """Return flag (or path in a file) -> value (JSON) for a checkpoint, including the resolved batch."""
    compared = (pair for pair in settings(plan.config) if pair[0].section not in NOT_COMPARED)
    found = {option.place: value for option, value in compared}
    found["--global-batch-size"] = plan.batch.global_batch_size
    found[REPLICAS] = plan.batch.data_parallel
    return json.loads(json.dumps(found))


def describe_changes(saved: Mapping[str, object], current: Mapping[str, object]) -> list[str]:
    """Return a line with every changed value, or none. Skip settings that older checkpoints lack."""
    changed = [name for name, value in current.items() if name in saved and saved[name] != value]
    lines = [f"{name} {_shown(saved[name])} -> {_shown(current[name])}" for name in changed]
    return ["changed since the checkpoint: " + ", ".join(lines)] if lines else []


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


def _is_part(name: str, accepted: str) -> bool:
    return name == accepted or name.startswith(accepted + ".")


def corpus_sample(files: StoreFiles, known: KnownFiles = FORGETFUL) -> list[str]:
    """Return the SHA-256 of a corpus's index, and of `SAMPLES` evenly spaced pieces of its tokens.

    Each piece has `SAMPLE_BYTES`; the end of the file is included. If the file is larger than all pieces
    together, a change between pieces that keeps all lengths goes unnoticed.
    """
    size, digest = files.bin.stat().st_size, hashlib.sha256()
    last = max(0, size - SAMPLE_BYTES)
    with files.bin.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(last * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return [known.sha256(files.idx), digest.hexdigest()]


def _as_now(saved: Mapping[str, object], current: Mapping[str, object]) -> dict[str, object]:
    """Return `saved` under today's names of its teachers, and with the defaults of newer options."""
    teachers = ([name for name in prints if name.startswith(TEACHER)] for prints in (saved, current))
    names = {then: now for then, now in zip(*teachers, strict=False) if saved[then] == current[now]}
    defaults = {option.path: json.loads(json.dumps(option.default)) for option in all_options()}
    later = {name: _option_path(name) for name in current.keys() - saved.keys()}
    known = {name: defaults[path] for name, path in later.items() if path in defaults}
    if saved.get("loss.kd_ratio") == 0 and not any(name.startswith(OF_TEACHERS) for name in current):
        # Older versions recorded teachers that the loss did not read.
        saved = {name: value for name, value in saved.items() if not name.startswith(OF_TEACHERS)}
    if saved.get(FILES) == _sha256([]):  # older versions recorded no files for a stored teacher
        saved = dict(saved) | {name: current[name] for name in (FILES, STORED_K) if name in current}
    known |= {name: current[name] for name in (CONTENT, CHAT_LOSS, CHAT_VARIABLES) if name in current}
    return known | {names.get(name, name): value for name, value in saved.items()}


def _option_path(name: str) -> str:
    """Return the path of the option behind a name of `_loss`. The first teacher serves for all."""
    field = name.removeprefix("loss.")
    of_first = re.sub(r"^teachers\[\d+\]", FIRST_TEACHER, field)
    if field.startswith("teachers["):
        return of_first
    return next((one.path for one in all_options() if one.name == field), field)


def _corpus(store: TokenStore) -> dict[str, object]:
    """Return the sizes of a corpus's files, and the part of its description that covers the contents."""
    files = StoreFiles(store.prefix)
    paths = (files.bin, files.idx, files.loss_mask, files.images, files.image_sources, files.tags)
    sizes = [path.stat().st_size for path in paths if path.exists()]
    meta = {name: value for name, value in store.meta.items() if name not in NOT_CONTENT}
    return {"sizes": sizes, "meta": meta}


def _data(config: Config) -> Iterator[tuple[str, object]]:
    """Yield the settings that decide the order of samples."""
    values = {"seq_length": config.training.seq_length, "seed": config.training.seed}
    values["weights"] = parse_blend(config.data.data_path).weights if config.data.data_path else None
    for name in ("split", "pack", "overlong", "append_eod", "shuffle"):
        values[name] = getattr(config.data, name)
    if config.data.max_patches_per_pack is not None:  # absent as in earlier versions
        values["max_patches_per_pack"] = config.data.max_patches_per_pack
    for name, value in values.items():
        yield f"data.{name}", value


def _loss(config: Config) -> Iterator[tuple[str, object]]:
    """Yield the settings that decide the loss."""
    is_read = config.needs_models  # else teachers may be named, and nothing reads them
    for option, value in settings(config):
        if option.field not in NOT_LOSS and option.path.startswith("kd."):
            yield f"loss.{option.field}", value
        elif is_read and option.path.startswith("teachers[") and option.field not in NOT_OF_TEACHER:
            yield f"loss.{option.path}", value
    for index, teacher in enumerate(config.teachers if is_read else ()):
        if teacher.xtoken is not None:  # as a former option had it: earlier checkpoints must compare equal
            yield f"loss.teachers[{index}].xtoken.exact_token_match_only", False


def _sha256(content: object) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    kind, colon, digest = text.rpartition(":")
    return kind + colon + digest[:12] if len(digest) == 64 else text
