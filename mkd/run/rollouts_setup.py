"""Set up the rollouts of a run: the prompts, the stream of batches, the meter of the teachers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mkd.checkpoint.distributed import TrainingState
from mkd.checkpoint.folders import TrainingPosition
from mkd.data.aligned.aligned_ids import Pair
from mkd.data.aligned.teacher_pieces import LENGTH_UNIT
from mkd.data.dataset import BlendedDataset
from mkd.data.prompts import PromptSet, read_prompts
from mkd.data.teacher_input import SharedTokens
from mkd.operations.cleanup import Cleanup
from mkd.operations.phases import ROLLOUT, Phases
from mkd.operations.run_folders import log_folder
from mkd.parallel.context import ParallelContext
from mkd.plan.rollout_plan import RolloutBatch
from mkd.rollout.reward_calls import RewardCalls
from mkd.rollout.rewards import Rewards
from mkd.rollout.rollout_stream import InProcessSource, RolloutStream
from mkd.rollout.rollout_teachers import AlignedRollouts, RolloutTeacher, SharedRollouts
from mkd.rollout.rollouts import RolloutSource, Sampling
from mkd.rollout.stop_ids import stop_ids
from mkd.run.cross_tokenizer_setup import CrossTokenizerTeacher, teacher_texts
from mkd.run.rollout_server_setup import build_server_source
from mkd.run.run_plan import Plan
from mkd.train.rollout_meter import RolloutMeter
from mkd.train.step import Engine
from mkd.train.teachers.cross_tokenizer import CrossTokenizer
from mkd.train.teachers.same_tokens import SameTokens

SPARE_ROOM = 1.25  # in the packs of cross-tokenizer teachers: texts vary
FAILED_REWARDS_FILE = "failed_rewards.jsonl"  # in the log folder, if a reward failed


def build_prompts(plan: Plan) -> PromptSet | None:
    """Read the prompts; None for a run without rollouts. Raises DataError for records that are none."""
    config = plan.config
    if not config.rollout.is_on:
        return None
    assert plan.tokenizers is not None, "a run reads text"
    longest = config.training.seq_length - config.rollout.max_new_tokens
    tokenizer, bad = plan.tokenizers.student, config.data.max_bad_records
    teachers = {
        name: own
        for name, own in zip(plan.teacher_names, plan.tokenizers.teachers, strict=False)
        if own is not None
    }
    paths, has_rewards = config.rollout.prompt_data_path, config.feedback.has_rewards
    return read_prompts(paths, tokenizer, longest, plan.known_ids, bad, teachers, has_rewards)


def with_room(
    plan: Plan,
    cross_tokenizer: Mapping[int, CrossTokenizerTeacher],
    prompts: PromptSet | None,
    document_multiple: int,
) -> dict[int, CrossTokenizerTeacher]:
    """Return the teachers with packs that have room for completions.

    By default their number of tokens is that of the student's, times the proportion of both in the prompts,
    times SPARE_ROOM.
    """
    found = dict(cross_tokenizer)
    if prompts is None:
        return found
    seq_length = plan.config.training.seq_length
    for index, one in cross_tokenizer.items():
        ours = sum(len(prompt.ids) for prompt in prompts.prompts)
        theirs = sum(len(prompt.of_teachers[one.text.name]) for prompt in prompts.prompts)
        unit, needed = document_multiple * LENGTH_UNIT, seq_length * max(1.0, SPARE_ROOM * theirs / ours)
        text = replace(one.text, least_seq_length=math.ceil(needed / unit) * unit)
        found[index] = replace(one, text=text)
    return found


def teacher_seq_lengths(
    plan: Plan,
    train_set: BlendedDataset | None,
    valid_set: BlendedDataset | None,
    cross_tokenizer: Mapping[int, CrossTokenizerTeacher],
) -> tuple[int, ...]:
    """Return the tokens of every teacher's packs, which all data sets and the completions share."""
    dataset = train_set if train_set is not None else valid_set
    if dataset is not None:
        return dataset.teacher_seq_lengths
    texts = teacher_texts(plan, cross_tokenizer)
    ours = plan.config.training.seq_length
    return tuple(
        ours if isinstance(text, SharedTokens) else text.seq_length or text.least_seq_length for text in texts
    )


def build_rewards(
    plan: Plan, prompts: PromptSet | None, context: ParallelContext, phases: Phases, cleanup: Cleanup
) -> Rewards | None:
    """Start the reward function, which `cleanup` ends; None for a run without one. Collective.

    Raises UsageError if it is none.
    """
    feedback = plan.config.feedback
    if prompts is None or feedback.reward is None:
        return None
    assert plan.tokenizers is not None, "a run reads text"
    rewards = Rewards(
        calls=RewardCalls(feedback.reward, feedback.reward_timeout_s),
        prompts=prompts,
        tokenizer=plan.tokenizers.student,
        context=context,
        group_size=plan.config.rollout.samples_per_prompt,
        max_failed=feedback.max_failed_rewards,
        file=log_folder(plan.config) / FAILED_REWARDS_FILE,
        announce=lambda iteration: phases.enter(ROLLOUT, iteration),
    )
    rewards.start()
    cleanup.add(lambda error: rewards.calls.close())
    return rewards


def build_rollouts(
    plan: Plan,
    engine: Engine,
    state: TrainingState,
    prompts: PromptSet,
    dataset: BlendedDataset | None,  # stored packs
    position: TrainingPosition,
    phases: Phases,
    cross_tokenizer: Mapping[int, CrossTokenizerTeacher],
    seq_lengths: Sequence[int],  # tokens of every teacher's packs
    fingerprints: Mapping[str, object],  # of the run
    rewards: Rewards | None = None,
) -> tuple[RolloutStream, RolloutMeter]:
    """Return this rank's batches from `position` on, and the meter of its steps."""
    config, training, rollout = plan.config, plan.config.training, plan.config.rollout
    assert plan.tokenizers is not None, "a run reads text"
    tokenizer = plan.tokenizers.student
    sampling = Sampling(
        max_new_tokens=rollout.max_new_tokens,
        stop_ids=stop_ids(plan.student.assets, tokenizer),
        vocab_size=plan.known_ids,
        unused_ids=plan.unused_ids,
        temperature=rollout.rollout_temperature,
        slots=rollout.rollout_slots,
        prefill_tokens=training.seq_length * plan.batch.micro_batch_size,
        seed=training.seed,
    )
    source: RolloutSource
    if rollout.samples_here:
        source = InProcessSource(state.models, engine.context, sampling, engine.parameters_gathered)
    else:
        resumes = bool(config.checkpoint.load)
        source = build_server_source(plan, engine, state, sampling, fingerprints, resumes)
    stream = RolloutStream(
        source=source,
        context=engine.context,
        prompts=prompts,
        dataset=dataset,
        batch=RolloutBatch.from_config(config, plan.batch.global_batch_size),
        micro_batch_size=plan.batch.micro_batch_size,
        seq_length=training.seq_length,
        pad_id=tokenizer.padding_id(plan.known_ids),
        teachers=_rollout_teachers(plan, prompts, cross_tokenizer, seq_lengths),
        seed=training.seed,
        shuffle=config.data.shuffle,
        drops_truncated=rollout.rollout_truncated == "drop",
        iteration=position.iteration,
        last_iteration=training.train_iters,
        consumed_prompts=position.consumed_prompts,
        consumed_samples=position.consumed_samples,
        announce=lambda iteration: phases.enter(ROLLOUT, iteration),
        rewards=rewards,
    )
    teachers = [one for one in engine.teachers if isinstance(one, SameTokens | CrossTokenizer)]
    return stream, RolloutMeter(engine.context, stream, teachers, sampling.vocab_size)


def _rollout_teachers(
    plan: Plan,
    prompts: PromptSet,
    cross_tokenizer: Mapping[int, CrossTokenizerTeacher],
    seq_lengths: Sequence[int],
) -> list[RolloutTeacher]:
    """Return every teacher's side of the completions."""
    assert plan.tokenizers is not None, "a run reads text"
    ours = plan.tokenizers.student
    found: list[RolloutTeacher] = []
    for text, length in zip(teacher_texts(plan, cross_tokenizer), seq_lengths, strict=True):
        if isinstance(text, SharedTokens):
            found.append(SharedRollouts(length))
            continue
        pair = Pair(ours, text.tokenizer, text.alignment, text.reasoning, plan.config.data.append_eod)
        found.append(AlignedRollouts(text, pair, prompts, length))
    return found
