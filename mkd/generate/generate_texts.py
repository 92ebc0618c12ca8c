"""The job: check everything, let the teacher sample what is missing, judge, select and write."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

from mkd.chat.writer import Reader, reader_of
from mkd.errors import ErrorList, MkdError, UsageError
from mkd.generate.generate_job import Job, show
from mkd.generate.generate_settings import GenerateSettings
from mkd.generate.in_process_teacher import not_writable, run_here
from mkd.generate.served_teacher import ServedReader, run_served, served_teacher
from mkd.generate.teacher_prompts import TeacherPrompts, read_teacher_prompts
from mkd.generate.work_folder import WorkFolder, known_date
from mkd.human import counted
from mkd.kinds.sampled.reward.reward_calls import RewardCalls
from mkd.kinds.sampled.rollout_limits import sampling_limit
from mkd.parallel.agreement import on_rank_0
from mkd.platform import Platform
from mkd.run.one_model import plan_model
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.load import open_tokenizer

LOG = logging.getLogger("mkd")
SHOWN = 600  # characters of the first prompt, its end


def generate(settings: GenerateSettings, platform: Platform, world_size: int) -> None:
    """Write the data of the job. Collective. The same call resumes it after a kill."""
    settings = replace(settings, chat=settings.chat.dated(known_date(settings.out)))
    is_served = settings.server is not None
    reader = served_teacher(settings) if is_served else open_teacher(settings, platform.is_cuda, world_size)
    prompts = read_prompts_of(settings, reader)
    folder = WorkFolder(
        settings.out, _identity(settings, reader, prompts), _selection(settings), settings.chat.date
    )
    folder.require_ours(settings.overwrite)
    _announce(settings, reader, prompts)
    _check_reward(settings)
    if settings.dry_run:
        return
    job = Job(settings, reader, prompts, folder)
    if isinstance(reader, ServedReader):
        known = folder.open(settings.overwrite)
        if known is None:
            run_served(job, reader)
    else:
        context = reader.plan.join(platform)
        finished = on_rank_0(lambda: folder.open(settings.overwrite), not_writable)
        known = context.broadcast_object(finished)
        if known is None:
            run_here(job, context)
    if known is not None:
        LOG.info(f"{settings.out} is complete already")
        show(known, settings)
    folder.close()
    if not isinstance(reader, ServedReader):
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
    generation, dtype = settings.generation, "bf16" if reader.plan.config.training.bf16 else "fp32"
    is_served = isinstance(reader, ServedReader)
    return {
        "teacher": reader.fingerprint
        if isinstance(reader, ServedReader)
        else reader.source.ends_fingerprint(),
        "prompts": prompts.fingerprint,
        "stop_ids": sorted(reader.stops),
        "dtype": "server" if is_served else dtype,
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
