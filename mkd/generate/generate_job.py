"""One start of a job on one process: what is missing, its rewards, and the output at the end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mkd.chat.writer import Reader
from mkd.data.quarantine import append
from mkd.generate.completions import CONTEXT, Completion
from mkd.generate.generate_settings import GenerateSettings
from mkd.generate.journal import Journal, Lines, write_lines
from mkd.generate.judge import Judge
from mkd.generate.selection import Index, Selection, summary_lines
from mkd.generate.teacher_prompts import TeacherPrompts
from mkd.generate.teacher_records import begun_text, is_utf8, num_control_tokens, text_after, without_stop
from mkd.generate.work_folder import WorkFolder
from mkd.human import counted, duration, tokens_per_s
from mkd.kinds.sampled.reward.reward_calls import RewardCalls
from mkd.kinds.sampled.sampler.rollouts import STOP, Request, Rollout

LOG = logging.getLogger("mkd")
BAD_RECORDS = "bad_records.jsonl"


@dataclass
class Job:
    """The parts of a job that do not depend on who samples."""

    settings: GenerateSettings
    reader: Reader
    prompts: TeacherPrompts
    folder: WorkFolder

    def __post_init__(self) -> None:
        self._by_number = {one.number: one for one in self.prompts.prompts}

    def reward_calls(self) -> RewardCalls | None:
        """Return the reward function, which has not started; None without one."""
        rule = self.settings.filter
        return None if rule.reward is None else RewardCalls(rule.reward, rule.reward_timeout_s)

    def judge(self, calls: RewardCalls | None, rank: int) -> Judge:
        """Return what judges completions and writes them to the journal of this process."""
        journal = Journal(self.folder.path, rank)
        return Judge(calls, self.reader.tokenizer, journal.add, self.settings.filter.max_failed)

    def judge_again(self, index: Index, judge: Judge, rank: int = 0, size: int = 1) -> None:
        """Judge the completions of an earlier start that have no reward, a share of them."""
        if judge.calls is None:
            return
        with Lines() as lines:
            for one in index.without_reward()[rank::size]:
                completion = lines.read(one.file, one.place)
                judge.add(self._by_number[completion.prompt], completion)

    def missing(self, index: Index, rank: int = 0, size: int = 1) -> list[Request]:
        """Return the requests of a share of the prompts that are not finished."""
        samples = self.settings.generation.samples
        found = [(one, index.missing(one.number, samples)) for one in self.prompts.prompts]
        mine = [pair for pair in found if pair[1]][rank::size]
        return [Request(one.number, sample, one.ids) for one, some in mine for sample in some]

    def add(self, rollout: Rollout, judge: Judge) -> None:
        """Judge and write a sampled completion."""
        judge.add(self._by_number[rollout.request.prompt], completion_of(self.reader, rollout))

    def finish(self, work: Sequence[tuple[int, float]]) -> None:
        """Select, write the output and log the summary. `work` has tokens and seconds of each process."""
        index = Index.read(self.folder.path)
        begun = {one.number: begun_text(self.reader.tokenizer, one) for one in self.prompts.prompts}
        selection = Selection(self.settings.filter)
        samples = self.settings.generation.samples
        records = selection.records(index, self.prompts.prompts, samples, begun)
        _, digest = write_lines(self.folder.output, records)
        append((one.entry for one in self.prompts.bad), self.folder.path / BAD_RECORDS)
        summary = {**selection.summary(), "sha256": digest}
        self.folder.finish(summary)
        tokens, seconds = sum(count for count, _ in work), max(seconds for _, seconds in work)
        if tokens:
            rate = tokens_per_s(tokens, seconds)
            LOG.info(f"sampled {tokens:,} tokens in {duration(seconds)}: {rate}")
        show(summary, self.settings)


def completion_of(reader: Reader, rollout: Rollout) -> Completion:
    """Return a sampled completion as a journal has it."""
    request, ids = rollout.request, rollout.ids.tolist()
    is_full = rollout.finish != STOP and len(request.ids) + len(ids) >= reader.context_length
    body = without_stop(ids, reader.stops)
    return Completion(
        prompt=request.prompt,
        sample=request.sample,
        text=text_after(reader.tokenizer, request.ids.tolist(), body),
        end=CONTEXT if is_full else rollout.finish,
        tokens=len(ids),
        logp=float(rollout.logp.sum(dtype="float64")),
        control=num_control_tokens(reader.tokenizer, body),
        is_utf8=is_utf8(reader.tokenizer, body),
    )


def show(summary: dict[str, Any], settings: GenerateSettings) -> None:
    """Log a summary."""
    for line in summary_lines(summary, settings.filter, settings.generation.max_new_tokens):
        LOG.info(line)
    LOG.info(f"{counted(summary['kept'], 'record')} in {settings.out}")
