"""The job: check everything, let the teacher sample what is missing, judge, select and write."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mkd.chat.writer import Reader, Writer, reader_of, writer_of
from mkd.data.quarantine import append
from mkd.errors import ErrorList, MkdError, OutOfMemory, UsageError
from mkd.generate.completions import CONTEXT, Completion
from mkd.generate.generate_settings import GenerateSettings
from mkd.generate.journal import Journal, Lines, write_lines
from mkd.generate.judge import Judge
from mkd.generate.selection import Index, Selection, summary_lines
from mkd.generate.teacher_prompts import TeacherPrompts, read_teacher_prompts
from mkd.generate.teacher_records import begun_text, num_control_tokens, text_after, without_stop
from mkd.generate.work_folder import WorkFolder, known_date
from mkd.human import counted, duration
from mkd.kinds.sampled.reward.reward_calls import RewardCalls
from mkd.kinds.sampled.rollout_limits import sampling_limit
from mkd.kinds.sampled.sampler.rollouts import STOP, Request, Rollout
from mkd.parallel.agreement import agree, on_rank_0, together
from mkd.parallel.context import ParallelContext
from mkd.platform import Platform
from mkd.run.one_model import plan_model
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.load import open_tokenizer

LOG = logging.getLogger("mkd")
LINE_S = 30.0  # between lines about progress
WAIT = timedelta(days=7)  # of processes that have finished, for the others
SHOWN = 600  # characters of the first prompt, its end
BAD_RECORDS = "bad_records.jsonl"


def generate(settings: GenerateSettings, platform: Platform, world_size: int) -> None:
    """Write the data of the job. Collective. The same call resumes it after a kill."""
    settings = replace(settings, chat=settings.chat.dated(known_date(settings.out)))
    reader = open_teacher(settings, platform.is_cuda, world_size)
    prompts = read_prompts_of(settings, reader)
    folder = WorkFolder(
        settings.out, _identity(settings, reader, prompts), _selection(settings), settings.chat.date
    )
    folder.require_ours(settings.overwrite)
    _announce(settings, reader, prompts)
    _check_reward(settings)
    if settings.dry_run:
        return
    context = reader.plan.join(platform)
    finished = on_rank_0(lambda: folder.open(settings.overwrite), _not_writable)
    if (known := context.broadcast_object(finished)) is not None:
        LOG.info(f"{settings.out} is complete already")
        _show(known, settings)
    else:
        _Job(settings, reader, prompts, folder, context).run()
    folder.close()
    context.leave()


def open_teacher(settings: GenerateSettings, is_cuda: bool, world_size: int) -> Reader:
    """Return the teacher without its weights. Raises its problems as one error."""
    problems: list[MkdError] = []
    plan = plan_model(problems, settings.config(is_cuda), world_size, teacher=0)
    if plan is None:
        raise ErrorList(problems)
    reader = reader_of("teacher", plan, open_tokenizer(plan.source.assets, settings.chat))
    length = reader.context_length
    limit = sampling_limit(plan.source.shape, length)
    if limit is not None:
        what, why = f"the teacher has {limit}", "mkd cannot sample with it yet"
        do = "let a vLLM server sample: --server-url URL"
        raise ErrorList([UsageError(what, why, do, code="model-feature-not-supported")])
    return reader


def read_prompts_of(settings: GenerateSettings, reader: Reader) -> TeacherPrompts:
    """Read the prompts as the teacher reads them. Raises DataError, and UsageError for flags without use."""
    prompts = read_teacher_prompts(
        settings.prompts, reader.encode, settings.as_chat, settings.system, settings.max_bad_records
    )
    if settings.system and not any(isinstance(one.prompt, Conversation) for one in prompts.prompts):
        what, why = "--system has no effect", "all prompts are plain texts, which have no system prompt"
        do = "add --chat to make messages of them, or leave out --system"
        raise UsageError(what, why, do, code="remove-flag")
    return prompts


def _identity(settings: GenerateSettings, reader: Reader, prompts: TeacherPrompts) -> dict[str, Any]:
    """Return what decides the completions."""
    generation = settings.generation
    return {
        "teacher": reader.source.ends_fingerprint(),
        "prompts": prompts.fingerprint,
        "stop_ids": sorted(reader.stops),
        "dtype": "bf16" if reader.plan.config.training.bf16 else "fp32",
        "max_new_tokens": generation.max_new_tokens,
        "temperature": generation.temperature,
        "top_p": generation.top_p,
        "seed": generation.seed,
        "samples_per_prompt": generation.samples,
        "reward": settings.filter.reward,
    }


def _selection(settings: GenerateSettings) -> dict[str, Any]:
    rule = settings.filter
    return {"min_reward": rule.min_reward, "keep_best": rule.keep_best, "truncated": rule.truncated}


def _announce(settings: GenerateSettings, reader: Reader, prompts: TeacherPrompts) -> None:
    """Log the teacher, the prompts, and the first one as the teacher reads it."""
    generation = settings.generation
    total = len(prompts.prompts) * generation.samples
    LOG.info(f"teacher {reader.describe()}")
    LOG.info(
        f"{prompts.describe()}; {counted(total, 'completion')} of at most {generation.max_new_tokens} tokens"
    )
    for one in prompts.bad[:3]:
        LOG.info(f"skipped {one.what}")
    cut = sum(len(one.ids) + generation.max_new_tokens > reader.context_length for one in prompts.prompts)
    if cut:
        LOG.info(
            f"{counted(cut, 'prompt')} leave less than --max-new-tokens {generation.max_new_tokens} of the "
            f"teacher's context of {reader.context_length} tokens"
        )
    if settings.dry_run:
        first = reader.tokenizer.decode(prompts.prompts[0].ids.tolist())
        LOG.info(f"the first prompt as the teacher reads it:\n{first[-SHOWN:]}")


def _check_reward(settings: GenerateSettings) -> None:
    """Raise UsageError if the reward function cannot be imported."""
    if settings.filter.reward is not None and os.environ.get("RANK", "0") == "0":
        calls = RewardCalls(settings.filter.reward, settings.filter.reward_timeout_s)
        calls.start()
        calls.close()


@dataclass
class _Job:
    """One start of the job on one process."""

    settings: GenerateSettings
    reader: Reader
    prompts: TeacherPrompts
    folder: WorkFolder
    context: ParallelContext

    def run(self) -> None:
        """Sample what is missing, then select and write. Collective."""
        context, rule = self.context, self.settings.filter
        # Made now: in the end, processes wait for each other longer than NCCL may.
        group = dist.new_group(backend="gloo", timeout=WAIT) if context.world_size > 1 else None
        is_leader = context.tp_rank == context.pp_rank == 0  # of the processes with one copy of the teacher
        calls = None
        if rule.reward is not None and is_leader:
            calls = RewardCalls(rule.reward, rule.reward_timeout_s)
        together(calls.start if calls else _nothing, _not_writable)
        index = together(lambda: Index.read(self.folder.path), _not_writable)
        agree(None)  # all have read the journals: they may grow now
        if context.rank == 0 and index.known:
            LOG.info(f"{counted(len(index.known), 'completion')} of an earlier start are kept")
        judge = None
        if is_leader:
            journal = Journal(self.folder.path, context.rank)
            judge = Judge(calls, self.reader.tokenizer, journal.add, rule.max_failed)
        begin = time.perf_counter()
        try:
            tokens = self._complete(index, judge)
            if judge is not None:
                judge.close()
        finally:
            if judge is not None:
                judge.stop()
        mine = (tokens if is_leader else 0, time.perf_counter() - begin)
        all_work = [mine]
        if group is not None:
            all_work = [mine] * context.world_size
            dist.all_gather_object(all_work, mine, group=group)
        if context.rank == 0:
            self._finish(sum(count for count, _ in all_work), max(seconds for _, seconds in all_work))
        agree(None)

    def _complete(self, index: Index, judge: Judge | None) -> int:
        """Judge again what has no reward, and sample the missing completions of this replica's prompts.

        Return the number of sampled tokens.
        """
        by_number = {one.number: one for one in self.prompts.prompts}
        size, rank = self.context.dp_size, self.context.dp_rank
        if judge is not None and judge.calls is not None:
            with Lines() as lines:
                for one in index.without_reward()[rank::size]:
                    completion = lines.read(one.file, one.place)
                    judge.add(by_number[completion.prompt], completion)
        samples = self.settings.generation.samples
        missing = [(one, index.missing(one.number, samples)) for one in self.prompts.prompts]
        mine = [pair for pair in missing if pair[1]][rank::size]
        requests = [Request(one.number, sample, one.ids) for one, some in mine for sample in some]
        if not any(some for _, some in missing):
            return 0  # on all processes: the weights are not needed
        writer = self._load()
        total = 0
        for rollout in _completed(writer, requests, self._generation(writer, requests)):
            total += len(rollout.ids)
            if judge is not None:
                judge.add(by_number[rollout.request.prompt], completion_of(writer, rollout))
        return total

    def _load(self) -> Writer:
        with _memory_explained():
            return writer_of(self.reader, self.context)

    def _generation(self, writer: Writer, requests: Sequence[Request]) -> Any:
        return self.settings.generation

    def _finish(self, tokens: int, seconds: float) -> None:
        """Select, write the output and show the summary, on rank 0."""
        index = Index.read(self.folder.path)
        begun = {one.number: begun_text(self.reader.tokenizer, one) for one in self.prompts.prompts}
        selection = Selection(self.settings.filter)
        samples = self.settings.generation.samples
        records = selection.records(index, self.prompts.prompts, samples, begun)
        _, digest = write_lines(self.folder.output, records)
        append((one.entry for one in self.prompts.bad), self.folder.path / BAD_RECORDS)
        summary = {**selection.summary(), "sha256": digest}
        self.folder.finish(summary)
        if tokens:
            rate = tokens / max(seconds, 1e-9)
            LOG.info(f"sampled {tokens:,} tokens in {duration(seconds)}: {rate:,.0f} tokens/s")
        _show(summary, self.settings)


def _completed(writer: Writer, requests: Sequence[Request], generation: Any) -> Iterator[Rollout]:
    """Yield completions as they end. A line tells the progress of this process now and then. Collective."""
    begin = shown = time.perf_counter()
    done = tokens = 0
    with _memory_explained():
        for row in writer.stream(requests, generation):
            tokens += len(row.tokens)
            for place in list(row.done):
                done += 1
                yield row.done.pop(place)
            if (now := time.perf_counter()) - shown > LINE_S:
                shown, rate = now, tokens / (now - begin)
                LOG.info(f"{done:,} of {len(requests):,} completions of this process, {rate:,.0f} tokens/s")


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
    )


def _show(summary: dict[str, Any], settings: GenerateSettings) -> None:
    for line in summary_lines(summary, settings.filter, settings.generation.max_new_tokens):
        LOG.info(line)
    LOG.info(f"{counted(summary['kept'], 'record')} in {settings.out}")


@contextmanager
def _memory_explained() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = f"the GPU has too little memory for the teacher and the keys and values of its texts: {error}"
        do = "lower --slots or --max-new-tokens, or split the teacher: --tensor-model-parallel-size N"
        raise OutOfMemory(what.splitlines()[0], "", do, code="out-of-gpu-memory") from error


def _nothing() -> None:
    return None


def _not_writable(error: Exception) -> MkdError:
    what = f"{type(error).__name__}: {error}"
    return UsageError(what, "", "check the folder of --out", code="not-writable")
