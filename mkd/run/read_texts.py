"""The text of a run: stored data, prompts, tasks, and how each teacher reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mkd.config.tag_rules import TagRules
from mkd.data.aligned.context_summary import summarise_context_prompts
from mkd.data.aligned.teacher_side import check_teacher_length
from mkd.data.dataset import BlendedDataset
from mkd.data.prompts import PromptSet, read_prompts
from mkd.data.records.wanted import WantedRecords
from mkd.data.tags import tags_of_run
from mkd.data.teacher_input import SharedTokens
from mkd.evaluation.task_evaluator import TaskEvaluator, build_tasks
from mkd.kinds.sampled.reward.reward_calls import RewardCalls
from mkd.kinds.sampled.reward.rewards import Rewards
from mkd.kinds.sampled.sources.known_sources import KNOWN_SOURCES
from mkd.kinds.texts import Texts
from mkd.operations.cleanup import Cleanup
from mkd.operations.phases import INIT, READING, ROLLOUT, Phases
from mkd.operations.run_folders import log_folder
from mkd.operations.signals import Signals
from mkd.parallel.context import ParallelContext
from mkd.resolve.chat_setup import describe_chat
from mkd.resolve.run_plan import Plan
from mkd.resolve.teacher_setup import TeacherSetup
from mkd.run.build_data import build_data, quarantine_file
from mkd.run.plan_run import with_ends_of, with_seen_parts
from mkd.run.text_notes import text_notes

FAILED_REWARDS_FILE = "failed_rewards.jsonl"  # in the log folder, if a reward failed


def read_texts(
    plan: Plan, context: ParallelContext, phases: Phases, cleanup: Cleanup, signals: Signals
) -> tuple[Plan, Texts, TaskEvaluator | None]:
    """Return the plan with what the text decides, the text, and held-out tasks. Collective."""
    assert plan.tokenizers is not None, "a run reads text"
    tokenizer = plan.tokenizers.student
    phases.enter(READING, 0)  # it may take long, if no process waits for it
    # Prompts come first, because packs of cross-tokenizer teachers need room for their completions.
    prompts = build_prompts(plan, phases)
    teachers = [one.meet(plan.config, plan.tokenizers, context) for one in plan.setups]
    if prompts is not None:
        length, multiple = plan.config.training.seq_length, context.document_multiple
        teachers = [one.with_room(prompts, length, multiple) for one in teachers]
    train_set, valid_set = build_data(plan, context, teachers, signals, phases, prompts)
    plan = with_seen_parts(train_set, with_ends_of(train_set, plan))
    tasks = build_tasks(plan.config, tokenizer, plan.known_ids, context, plan.tokenizers.images)
    rewards = build_rewards(plan, prompts, context, phases, cleanup)  # a broken function ends the run here
    # The data decide the length of the teachers' packs, which the pipeline's messages have.
    met = with_pack_lengths(plan, train_set, valid_set, teachers, context.document_multiple)
    tags = tag_names(plan, train_set if train_set is not None else valid_set, prompts)
    phases.enter(INIT, 0)
    return plan, Texts(train_set, valid_set, prompts, rewards, met, tags), tasks


def tag_names(plan: Plan, stored: BlendedDataset | None, prompts: PromptSet | None) -> tuple[str, ...]:
    """Return the tags of packs, in the order of their numbers; () if tags do not matter."""
    if stored is not None:
        return stored.tag_names
    rules = TagRules.of(plan.config, prompts.tags if prompts else ())
    if rules is None:
        return ()
    return tags_of_run(rules, ()) if prompts else tuple(rules.named)  # records come while the run trains


def describe_texts(plan: Plan, texts: Texts, tasks: TaskEvaluator | None) -> list[str]:
    """Return the sizes of the data sets, how much of them teachers cover, and how conversations are read."""
    assert plan.tokenizers is not None, "a run reads text"
    quarantine, lines = str(quarantine_file(plan.config)), []
    for name, part in (("training", texts.train_set), ("held-out", texts.valid_set)):
        described = part.describe(quarantine) if part is not None else []
        lines += [line if line.startswith(" ") else f"{name} {line}" for line in described]
    lines += tasks.describe() if tasks else []
    if texts.prompts:
        lines.append(texts.prompts.describe(quarantine))
        for text, length in ((one.text, one.seq_length) for one in texts.teachers if one.runs):
            if not isinstance(text, SharedTokens) and text.context is not None:
                ours = plan.tokenizers.student
                lines += summarise_context_prompts(text, ours, texts.prompts.prompts, length)
    models = [("student", plan.student.shape)]
    models += [(one.role, one.shape) for one in plan.facts.planned_teachers if one.shape is not None]
    lines += text_notes(texts.train_set, texts.valid_set, models)
    stored = (texts.train_set, texts.valid_set)
    return lines + describe_chat(plan.tokenizers.opened, stored, texts.prompts)


def build_prompts(plan: Plan, phases: Phases) -> PromptSet | None:
    """Read the prompts; None for a run without rollouts, empty for a source that has them itself.

    Each prompt counts as progress. Raises DataError for records that are none.
    """
    config = plan.config
    if not config.rollout.is_on:
        return None
    assert plan.tokenizers is not None, "a run reads text"
    if not KNOWN_SOURCES[config.rollout.rollout_source].reads_prompts:
        return PromptSet((), 0, "none")
    longest = config.training.seq_length - config.rollout.max_new_tokens
    tokenizer, bad = plan.tokenizers.student, config.data.max_bad_records
    readers = (one.prompt_reader(plan.tokenizers) for one in plan.setups)
    teachers = {
        one.name: reader for one, reader in zip(plan.setups, readers, strict=True) if reader is not None
    }
    paths, has_rewards = config.rollout.prompt_data_path, config.grpo.is_on
    rules = TagRules.of(config)
    more: dict[str, Any] = {"progress": partial(phases.enter, READING, 0)}
    if rules is not None:
        more |= {"wanted": WantedRecords(tag=config.kd.tag_key), "file_tags": rules.files}
    return read_prompts(paths, tokenizer, longest, plan.known_ids, bad, teachers, has_rewards, **more)


def with_pack_lengths(
    plan: Plan,
    train_set: BlendedDataset | None,
    valid_set: BlendedDataset | None,
    teachers: Sequence[TeacherSetup],
    document_multiple: int,
) -> tuple[TeacherSetup, ...]:
    """Return the teachers; those that run have packs of one length in all data sets and for completions.

    Raises UsageError if documents cannot be padded to one of them.
    """
    dataset = train_set if train_set is not None else valid_set
    running = [one for one in teachers if one.runs]
    if dataset is not None:
        lengths = dataset.teacher_seq_lengths
    else:
        lengths = tuple(one.pack_length(plan.config.training.seq_length) for one in running)
        for one, length in zip(running, lengths, strict=True):
            if not isinstance(one.text, SharedTokens):
                check_teacher_length(one.text, length, document_multiple)
    known = dict(zip((one.index for one in running), lengths, strict=True))
    return tuple(replace(one, seq_length=known.get(one.index, 0)) for one in teachers)


def build_rewards(
    plan: Plan, prompts: PromptSet | None, context: ParallelContext, phases: Phases, cleanup: Cleanup
) -> Rewards | None:
    """Start the reward function, which `cleanup` ends; None for a run without one. Collective.

    Raises UsageError if it is none.
    """
    settings = plan.config.grpo
    if not prompts or settings.reward is None:
        return None
    assert plan.tokenizers is not None, "a run reads text"
    rewards = Rewards(
        calls=RewardCalls(settings.reward, settings.reward_timeout_s),
        prompts=prompts,
        tokenizer=plan.tokenizers.student,
        context=context,
        group_size=plan.config.rollout.samples_per_prompt,
        max_failed=settings.max_failed_rewards,
        file=log_folder(plan.config) / FAILED_REWARDS_FILE,
        announce=lambda iteration: phases.enter(ROLLOUT, iteration),
    )
    rewards.start()
    cleanup.add(lambda error: rewards.calls.close())
    return rewards
