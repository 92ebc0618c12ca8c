"""Set up the rollouts of a run: the prompts, the stream of batches, the meter of the teachers."""

from __future__ import annotations

from mkd.checkpoint.distributed import TrainingState
from mkd.checkpoint.folders import TrainingPosition
from mkd.data.dataset import BlendedDataset
from mkd.data.prompts import PromptSet, read_prompts
from mkd.operations.phases import ROLLOUT, Phases
from mkd.operations.run_folders import log_folder
from mkd.parallel.context import ParallelContext
from mkd.plan.rollout_plan import RolloutBatch
from mkd.rollout.reward_calls import RewardCalls
from mkd.rollout.rewards import Rewards
from mkd.rollout.rollout_stream import InProcessSource, RolloutStream
from mkd.rollout.rollouts import Sampling
from mkd.rollout.stop_ids import stop_ids
from mkd.run.run_plan import Plan
from mkd.train.rollout_meter import RolloutMeter
from mkd.train.step import Engine
from mkd.train.teachers.same_tokens import SameTokens

FAILED_REWARDS_FILE = "failed_rewards.jsonl"  # in the log folder, if a reward failed


def build_prompts(plan: Plan) -> PromptSet | None:
    """Read the prompts; None for a run without rollouts. Raises DataError for records that are none."""
    config = plan.config
    if not config.rollout.is_on:
        return None
    assert plan.tokenizers is not None, "a run reads text"
    longest = config.training.seq_length - config.rollout.max_new_tokens
    tokenizer, bad = plan.tokenizers.student, config.data.max_bad_records
    return read_prompts(config.rollout.prompt_data_path, tokenizer, longest, known_ids(plan), bad)


def build_rewards(
    plan: Plan, prompts: PromptSet | None, context: ParallelContext, phases: Phases
) -> Rewards | None:
    """Start the reward function; None for a run without one. Collective. Raises UsageError if it is none."""
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
    return rewards


def known_ids(plan: Plan) -> int:
    """Return the number of ids that the student and all teachers with its tokens know."""
    return min(source.shape.vocab_size for source in plan.same_vocabulary)


def build_rollouts(
    plan: Plan,
    engine: Engine,
    state: TrainingState,
    prompts: PromptSet,
    dataset: BlendedDataset | None,  # stored packs
    position: TrainingPosition,
    phases: Phases,
    rewards: Rewards | None = None,
) -> tuple[RolloutStream, RolloutMeter]:
    """Return this rank's batches from `position` on, and the meter of its steps."""
    config, training, rollout = plan.config, plan.config.training, plan.config.rollout
    assert plan.tokenizers is not None, "a run reads text"
    tokenizer = plan.tokenizers.student
    sampling = Sampling(
        max_new_tokens=rollout.max_new_tokens,
        stop_ids=stop_ids(plan.student.assets, tokenizer),
        vocab_size=known_ids(plan),
        temperature=rollout.rollout_temperature,
        slots=rollout.rollout_slots,
        prefill_tokens=training.seq_length * plan.batch.micro_batch_size,
        seed=training.seed,
    )
    stream = RolloutStream(
        source=InProcessSource(state.models, engine.context, sampling, engine.parameters_gathered),
        prompts=prompts,
        dataset=dataset,
        batch=RolloutBatch.from_config(config, plan.batch.global_batch_size),
        micro_batch_size=plan.batch.micro_batch_size,
        seq_length=training.seq_length,
        pad_id=tokenizer.pad_id,
        num_teachers=len(plan.teachers),
        seed=training.seed,
        shuffle=config.data.shuffle,
        drops_truncated=rollout.rollout_truncated == "drop",
        iteration=position.iteration,
        consumed_prompts=position.consumed_prompts,
        consumed_samples=position.consumed_samples,
        announce=lambda iteration: phases.enter(ROLLOUT, iteration),
        rewards=rewards,
    )
    teachers = [one for one in engine.teachers if isinstance(one, SameTokens)]
    return stream, RolloutMeter(engine.context, stream, teachers, sampling.vocab_size)
