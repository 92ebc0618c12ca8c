"""Rollouts that other programs dump, as records of agents or as token records for training.

A reader yields what one dump holds, in the names of a record. The formats were read in these files:

- slime: `THUDM/slime`, slime/utils/types.py at 0d234f3e (class Sample, `to_dict`), and slime/ray/rollout.py
  (`_save_debug_rollout_data`): `torch.save({"rollout_id", "samples": [dict, ...]})`. `tokens` are prompt and
  response; `loss_mask` and `rollout_log_probs` cover the response alone.
- verl: `volcengine/verl`, verl/experimental/agent_loop/agent_loop.py (class AgentLoopOutput), as lines of
  `model_dump_json()`. The files of `trainer.rollout_data_dir` hold text without ids and are refused.
- prime-rl: `PrimeIntellect-ai/prime-rl`, src/prime_rl/transport/types.py (class TrainingSample), as lines of
  JSON with the names of its fields, in both of its forms: `token_ids`, `mask`, `logprobs`, or the older
  `prompt_ids`, `completion_ids` and so on. rollouts.bin has values without names, whose order changed between
  versions (e86de6cb and 02f03abb differ), and is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mkd.errors import DataError
from mkd.kinds.sampled.records.agent_record import ERROR, RecordLimits, read_fields, read_record
from mkd.kinds.sampled.sampler.rollouts import LENGTH, STOP

Fields = dict[str, Any]
SLIME_FINISHES = {"completed": STOP, "truncated": LENGTH, "aborted": ERROR, "failed": ERROR}
LARGEST = 2**31  # ids and tokens of a record; the run has its own limits


def convert_dumps(
    program: str,  # of READERS
    paths: Sequence[str | Path],
    version: str | None = None,  # of all records; None: the dump's own
    reward_key: str | None = None,  # of rewards that are objects
) -> Iterator[Fields]:
    """Yield the records of dumps. Groups are those of the dump, else equal prompts.

    Ids have a hash of the dump's content: files of several runs or steps often have one name.

    Raises DataError for a dump of another format, for one that comes twice, and for a record that no run
    would take.
    """
    records: list[Fields] = []
    known: dict[str, Path] = {}  # dumps by the hash of their content
    for path in map(Path, paths):
        samples = list(READERS[program](path))
        begin = _begin_of_ids(path, known)
        for number, found in enumerate(samples, 1):
            place = f"{path}, record {number}"
            with_reward = found | {"reward": _reward(found.get("reward"), reward_key, place)}
            records.append(with_reward | {"id": f"{begin}-{number}", "place": place})
    for record in records:
        record["group"] = record.get("group") or _prompt_hash(record)
    sizes = Counter(record["group"] for record in records)
    for record in records:
        place, group = record.pop("place"), record["group"]
        record["version"] = version or _one_version(record.get("version"), place)
        record["group_size"] = sizes[group]
        clean = {key: value for key, value in record.items() if value is not None}
        try:
            run = record["version"].rpartition("-")[0]
            read_record(clean, RecordLimits(run, LARGEST, LARGEST, group_size=1, needs_reward=False))
        except DataError as error:
            raise error.located(place) from error
        yield clean


def convert_to_tokens(program: str, paths: Sequence[str | Path]) -> Iterator[Fields]:
    """Yield the dumps as token records, for training on stored text. Failed samples are left out."""
    for path in map(Path, paths):
        for found in READERS[program](path):
            if found["finish"] != ERROR:
                yield {"tokens": {"ids": found["ids"], "loss": found["loss"]}}


def read_slime(path: Path) -> Iterator[Fields]:
    """Yield the samples of a file of --save-debug-rollout-data."""
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        samples = found["samples"]
    except Exception as error:  # pickles that hold other objects, other files
        what = f"{path} is no dump of slime: {type(error).__name__}"
        why = "it holds a list `samples` of plain values, as --save-debug-rollout-data writes them"
        raise _not_a_dump(what, f"{why}; other objects could run code") from error
    for sample in samples:
        if sample.get("remove_sample"):
            continue
        ids, count = _plain(sample["tokens"]), int(sample["response_length"])
        mask = _plain(sample.get("loss_mask"))
        versions = list(dict.fromkeys(map(str, sample.get("weight_versions") or [])))
        group = sample.get("group_index")
        yield _after_prompt(
            ids[: len(ids) - count],
            ids[len(ids) - count :],
            [1] * count if mask is None else mask,
            _plain(sample.get("rollout_log_probs")),
            path,
            group=None if group is None else f"{found.get('rollout_id', path.stem)}-{group}",
            reward=sample.get("reward"),
            finish=SLIME_FINISHES.get(str(sample.get("status")), ERROR),
            version=versions,
        )


def read_verl(path: Path) -> Iterator[Fields]:
    """Yield lines of AgentLoopOutput."""
    for fields in _lines(path):
        if "prompt_ids" not in fields and {"input", "output"} <= fields.keys():
            why = "verl's rollout_data_dir has the text of prompts and answers, and its ids cannot be known"
            raise _not_a_dump(f"{path} has no token ids", f"{why}: write AgentLoopOutput.model_dump_json()")
        _require(fields, ("prompt_ids", "response_ids", "response_mask"), path)
        more = {"group": fields.get("uid"), "reward": fields.get("reward_score"), "finish": STOP}
        yield _after_prompt(
            fields["prompt_ids"],
            fields["response_ids"],
            fields["response_mask"],
            fields.get("response_logprobs"),
            path,
            **more,
        )


def read_prime_rl(path: Path) -> Iterator[Fields]:
    """Yield lines of TrainingSample with the names of its fields, in its present and its older form."""
    if path.suffix == ".bin":
        why = "its values have no names, and their order changed between versions of prime-rl"
        raise _not_a_dump(f"{path} cannot be read safely", f"{why}: write the samples as lines with names")
    for fields in _lines(path):
        is_flat = "token_ids" in fields
        prefix = "" if is_flat else "completion_"
        temperatures = fields.get(f"{prefix}temperatures") or []
        if any(one != 1 for one in temperatures):
            what = f"{path}: temperatures are not 1"
            raise _not_a_dump(what, "ln p would not be that of the text that the student itself samples")
        advantage = fields.get("advantages", fields.get("advantage"))
        if isinstance(advantage, list) and not all(isinstance(one, int | float) for one in advantage):
            what = f"{path}: advantages are of several losses"
            raise _not_a_dump(what, "a record has one advantage for each token")
        more = {"tag": fields.get("env_name"), "reward": fields.get("reward"), "finish": STOP}
        if is_flat:
            _require(fields, ("mask",), path)
            mask = [int(one) for one in fields["mask"]]
            known = {"ids": fields["token_ids"], "loss": mask, "logp": fields.get("logprobs")}
            yield known | more | {"advantage": advantage}
        else:
            _require(fields, ("prompt_ids", "completion_ids", "completion_mask"), path)
            answer, mask = fields["completion_ids"], fields["completion_mask"]
            logp = fields.get("completion_logprobs")
            found = _after_prompt(fields["prompt_ids"], answer, mask, logp, path)
            yield found | more | {"advantage": advantage}


READERS: Mapping[str, Callable[[Path], Iterator[Fields]]] = {
    "prime-rl": read_prime_rl,
    "verl": read_verl,
    "slime": read_slime,
}
"""Name of a program -> the reader of its dumps."""


def _after_prompt(
    prompt: list[int], answer: list[int], mask: list[Any], logp: list[Any] | None, path: Path, **more: Any
) -> Fields:
    """Return ids, loss and ln p of a prompt, which has no loss, with an answer."""
    if len(mask) != len(answer) or (logp is not None and len(logp) != len(answer)):
        what = f"{path}: an answer of {len(answer)} tokens has a mask of {len(mask)}"
        what += "" if logp is None else f" and {len(logp)} log-probabilities"
        raise _not_a_dump(what, "each token of the answer has one of each")
    none = [None] * len(prompt)
    known = {"ids": [*prompt, *answer], "loss": [0] * len(prompt) + [int(one) for one in mask]}
    return known | {"logp": None if logp is None else [*none, *logp]} | more


def _begin_of_ids(path: Path, known: dict[str, Path]) -> str:
    """Return how the ids of a dump begin, and remember it in `known`. Raises DataError if it is known."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    if digest in known:
        what = f"{path} has the same content as {known[digest]}"
        why = "their records would have equal ids, and a run takes one record of each id"
        raise DataError(what, why, "give each dump once", code="record-value-not-valid")
    known[digest] = path
    return f"{path.stem}-{digest}"


def _one_version(versions: Any, place: str) -> str:
    """Return the oldest of a sample's versions "RUN-N". Raises DataError if it has none of this form."""
    found = [one for one in versions or [] if one.rpartition("-")[0] and one.rpartition("-")[2].isdigit()]
    if not found or len(found) < len(versions):
        raise DataError(
            f"{place}: it does not say which weights sampled it ({', '.join(versions or []) or 'nothing'})",
            "a run takes only text of its own weights that is new enough",
            "give --version RUN-N of progress.json, or set it as the version of the server's weights; or "
            "convert for training on stored text: --tokens",
            code="record-incomplete",
        )
    return min(found, key=lambda one: int(one.rpartition("-")[2]))


def _reward(reward: Any, key: str | None, place: str) -> Any:
    if not isinstance(reward, Mapping):
        return reward
    if key not in reward:
        what = f"{place}: the reward has the parts {', '.join(map(str, reward))}"
        raise DataError(what, "a record has one number", "name it: --reward-key", code="record-incomplete")
    return reward[key]


def _prompt_hash(record: Fields) -> str:
    loss = record["loss"]
    prompt = record["ids"][: loss.index(1) if 1 in loss else len(loss)]
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]


def _lines(path: Path) -> Iterator[Fields]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                yield read_fields(line)
            except DataError as error:
                raise error.located(f"{path}:{number}") from error


def _plain(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _require(fields: Fields, names: Sequence[str], path: Path) -> None:
    absent = [name for name in names if fields.get(name) is None]
    if absent:
        what = f"{path} has no {' and no '.join(absent)}"
        raise _not_a_dump(what, f"found are {', '.join(sorted(fields)[:8])}")


def _not_a_dump(what: str, why: str) -> DataError:
    do = "see docs/agent-records.md for the formats that are read"
    return DataError(what, why, do, code="record-without-known-keys")
