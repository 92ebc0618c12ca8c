"""One record of an agent: the token ids of a trajectory, with the loss and ln p of what was sampled."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mkd.config.tag_rules import TaughtTags
from mkd.data.records.given_loss import read_masked_ids
from mkd.data.records.values import json_name
from mkd.errors import DataError
from mkd.kinds.sampled.sampler.rollouts import LENGTH, STOP, Request, Rollout

ERROR = "error"
FINISHES = (STOP, LENGTH, ERROR)
ROUNDING = 1e-5  # by which ln p may be above 0
PLAIN = ({"temperature": 1, "top_p": 1, "top_k": 0}, {"top_k": -1})
"""Settings of sampling that leave the student's distribution as it is."""
NOT_READ = ("images", "videos")
TEACHER_IDS = "teacher_ids"
REPAIR = "repair the writer, or skip such records: --max-bad-records"


@dataclass(frozen=True)
class RecordLimits:
    """Limits of the records of a run."""

    run: str  # begins the name of each version
    vocab_size: int  # ids known to all models of the run
    seq_length: int
    group_size: int  # records of a group that do not say how many it has
    needs_reward: bool
    tags: tuple[str, ...] = ()  # of which each record has one; (): tags do not matter
    teachers: Mapping[str, bool] = field(default_factory=dict)
    """Teacher with a context -> True if a record may have none for it."""
    taught: Mapping[str, TaughtTags] = field(default_factory=dict)
    """Teacher with a context -> tags of records that need one; without an entry all do."""


@dataclass(frozen=True)
class AgentRecord:
    """A valid record."""

    id: str
    group: str
    group_size: int
    ids: np.ndarray  # [n] int64
    loss: np.ndarray  # [n] bool: the agent sampled this token
    logp: np.ndarray  # [n] float32, ln p where `loss`, else 0
    versions: tuple[int, ...]  # ascending: updates of the weights that sampled it
    finish: str
    reward: float | None = None
    advantage: float | np.ndarray | None = None  # [n]
    tag: str | None = None
    teacher_ids: Mapping[str, np.ndarray] = field(default_factory=dict)  # see `Rollout.of_teachers`
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False)
    place: tuple[str, int] = ("", 0)  # file and line

    def rollout(self, iteration: int) -> RecordedRollout:
        """Return the record for a step: the tokens before the first one with loss are its prompt."""
        sampled = np.flatnonzero(self.loss)
        first, end = int(sampled[0]), int(sampled[-1]) + 1
        prompt, sample = (
            int(hashlib.sha256(one.encode()).hexdigest()[:12], 16) for one in (self.group, self.id)
        )
        given = self.advantage
        return RecordedRollout(
            Request(prompt, sample, self.ids[:first]),
            self.ids[first:end],
            self.logp[first:end],
            -self.logp[first:end],
            self.finish,
            lag=iteration - 1 - self.versions[0],
            advantage=given[first:end] if isinstance(given, np.ndarray) else given or 0.0,
            loss=self.loss[first:end],
            of_teachers=self.teacher_ids,
            id=self.id,
            group=self.group,
            reward=self.reward,
            has_advantage=given is not None,
            tag=self.tag,
            place=self.place,
        )


@dataclass(frozen=True)
class RecordedRollout(Rollout):
    """A completion that an agent sampled, with the results of its tools between the parts that have loss."""

    id: str = ""
    group: str = ""
    has_advantage: bool = False  # the record has an advantage, which its reward does not replace
    tag: str | None = None
    place: tuple[str, int] = ("", 0)


class OtherRun(Exception):
    """A record was sampled with weights of another run."""


def read_fields(line: bytes) -> dict[str, Any]:
    """Return the keys and values of a line. Raises DataError."""
    try:
        found = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        why = "a line is one JSON object, and a file gets its name when it is complete"
        raise DataError(f"not valid JSON: {error}", why, REPAIR, code="record-not-json") from error
    if not isinstance(found, dict):
        what = f"a JSON {json_name(found)}, not an object"
        raise DataError(what, "a line is one record", REPAIR, code="record-not-json")
    return found


def read_record(
    fields: Mapping[str, Any], limits: RecordLimits, place: tuple[str, int] = ("", 0)
) -> AgentRecord:
    """Return the record in `fields`. Raises DataError for a wrong one, OtherRun for one of another run."""
    absent = [key for key in ("id", "version", "ids", "loss", "logp") if fields.get(key) is None]
    if absent:
        raise _wrong(
            f"the record has no {' and no '.join(absent)}", "each record needs it", "record-incomplete"
        )
    versions = _versions(fields["version"], limits.run)
    unread = NOT_READ if limits.teachers else (*NOT_READ, TEACHER_IDS)
    refused = next((key for key in unread if fields.get(key) is not None), None)
    if refused is not None:
        why = "no teacher has a context" if refused == TEACHER_IDS else "nothing reads it yet"
        raise _wrong(f"the record has {refused}", why, "record-key-not-supported")
    ((ids, loss),) = read_masked_ids(fields["ids"], fields["loss"], "ids", "loss")
    _check_tokens(ids, loss, limits)
    logp = _numbers(fields["logp"], "logp", loss, most=ROUNDING)
    advantage = fields.get("advantage")
    if isinstance(advantage, list):
        advantage = _numbers(advantage, "advantage", loss)
    elif advantage is not None:
        advantage = _number(advantage, "advantage")
    reward = None if fields.get("reward") is None else _number(fields["reward"], "reward")
    name = _text(fields["id"], "id")
    group = _text(fields["group"], "group") if fields.get("group") is not None else name
    group_size = fields.get("group_size", limits.group_size)
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
        raise _wrong(f"group_size is {group_size!r}", "it is a number of records, 1 or more")
    if limits.needs_reward and advantage is None and (reward is None or group_size < 2):
        why = "a policy loss needs the advantage, or rewards of a group of 2 or more"
        raise _wrong(f"the record of a group of {group_size} has no advantage", why, "record-incomplete")
    finish = fields.get("finish", STOP)
    if finish not in FINISHES:
        raise _wrong(f"finish is {finish!r}", f"it is one of {', '.join(FINISHES)}")
    _check_sampling(fields.get("sampling"))
    tag = None if fields.get("tag") is None else _text(fields["tag"], "tag")
    if limits.tags and tag not in limits.tags:
        why = f"it chooses the teachers, and those of the run have the tags {', '.join(limits.tags)}"
        raise _wrong(f"tag is {tag!r}", why)
    numbers = np.array(ids, dtype=np.int64), np.array(loss, dtype=bool), np.minimum(logp, 0)
    theirs = _teacher_ids(fields.get(TEACHER_IDS), limits, tag or "")
    return AgentRecord(
        name, group, group_size, *numbers, versions, finish, reward, advantage, tag, theirs, fields, place
    )


def _versions(value: Any, run: str) -> tuple[int, ...]:
    """Return the numbers of "RUN-12", or of [["RUN-11", 0], ["RUN-12", 57]]: name and first token."""
    spans: Any = [[value, 0]] if isinstance(value, str) else value
    is_list = (
        isinstance(spans, list) and spans and all(isinstance(one, list) and len(one) == 2 for one in spans)
    )
    if not is_list or not all(isinstance(name, str) and type(first) is int for name, first in spans):
        raise _wrong("version has another form", 'it is "RUN-N", or a list of ["RUN-N", first token]')
    found = []
    for name, _ in spans:
        owner, _, number = name.rpartition("-")
        if not number.isdigit() or not owner:
            raise _wrong(f"version is {name!r}", "it is copied from progress.json")
        if owner != run:
            raise OtherRun(owner)
        found.append(int(number))
    firsts = [first for _, first in spans]
    if firsts[0] != 0 or firsts != sorted(set(firsts)) or found != sorted(found):
        why = "spans begin at token 0, and both their tokens and their versions ascend"
        raise _wrong(f"the spans of version are out of order: {value}", why)
    return tuple(found)


def _check_tokens(ids: tuple[int, ...], loss: tuple[int, ...], limits: RecordLimits) -> None:
    if not any(loss) or loss[0]:
        what = "the first token has loss" if any(loss) else "no token has loss"
        raise _wrong(what, "loss is on sampled tokens, each predicted by the tokens before it")
    if max(ids) >= limits.vocab_size:
        what = f"an id is {max(ids)}, and the models know {limits.vocab_size}"
        raise _wrong(what, "another tokenizer made it, or the record is damaged", "token-beyond-vocabulary")


def _teacher_ids(given: Any, limits: RecordLimits, tag: str) -> dict[str, np.ndarray]:
    """Return the tokens of each teacher's own prompt, of the teachers of the record's `tag`."""
    found = {}
    for name, may_miss in limits.teachers.items():
        if name in limits.taught and tag not in limits.taught[name]:
            continue
        ids = given.get(name) if isinstance(given, Mapping) else given
        if ids is None:
            if may_miss:
                continue
            why = f"the teacher {name} reads them in place of the tokens before the first one with loss"
            raise _wrong(f"the record has no {TEACHER_IDS} for {name}", why, "record-incomplete")
        if not isinstance(ids, list) or not ids or not all(type(one) is int and one >= 0 for one in ids):
            raise _wrong(f"{TEACHER_IDS} for {name} are not ids", "they are a list of at least one token")
        if max(ids) >= limits.vocab_size:
            what = f"an id of {TEACHER_IDS} is {max(ids)}, and the models know {limits.vocab_size}"
            raise _wrong(what, "another tokenizer made it", "token-beyond-vocabulary")
        found[name] = np.array(ids, dtype=np.int64)
    return found


def _numbers(values: Any, name: str, loss: tuple[int, ...], most: float = math.inf) -> np.ndarray:
    """Return fp32 [n], 0 where there is no loss: there any value will do."""
    if not isinstance(values, list) or len(values) != len(loss):
        size = len(values) if isinstance(values, list) else f"a {json_name(values)}"
        raise _wrong(f"{name} is {size}, and ids has {len(loss)} tokens", "each token has one")
    found = np.zeros(len(loss), dtype=np.float32)
    for place, has_loss in enumerate(loss):
        if has_loss:
            found[place] = _number(values[place], f"{name} of token {place + 1}", most)
    return found


def _number(value: Any, name: str, most: float = math.inf) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value > most or abs(value) > 1e30:
        wanted = "a finite number" if most == math.inf else "the logarithm of a probability"
        raise _wrong(f"{name} is {value!r}", f"it must be {wanted}")
    return float(value)


def _text(value: Any, name: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise _wrong(f"{name} is {value!r}", "it is a text")
    return value


def _check_sampling(sampling: Any) -> None:
    if sampling is None:
        return
    plain, other = PLAIN
    if isinstance(sampling, Mapping):
        changed = [key for key, value in sampling.items() if value not in (plain.get(key), other.get(key))]
    else:
        changed = ["its form"]
    if changed:
        what = f"sampling changes the student's distribution: {', '.join(changed)}"
        why = "ln p of the record must be those of the text that the student itself samples"
        raise _wrong(what, why + ": temperature 1, top_p 1, top_k 0")


def _wrong(what: str, why: str, code: str = "record-value-not-valid") -> DataError:
    return DataError(what, why, REPAIR, code=code)
