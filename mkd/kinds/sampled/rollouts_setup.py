"""Set up the rollouts of a run: the stream of batches and the meter of the teachers."""

from __future__ import annotations

from collections.abc import Mapping

from mkd.checkpoint.distributed import TrainingState
from mkd.checkpoint.folders import TrainingPosition
from mkd.data.aligned.aligned_ids import Pair
from mkd.data.prompts import PromptSet
from mkd.data.teacher_input import SharedTokens
from mkd.kinds.routed.route_setup import teacher_routes
from mkd.kinds.sampled.made_contexts import MadeContexts
from mkd.kinds.sampled.records.record_meter import RecordMeter
from mkd.kinds.sampled.records.record_rewards import RecordRewards
from mkd.kinds.sampled.records.record_stream import RecordStream
from mkd.kinds.sampled.reward.rewards import Rewards
from mkd.kinds.sampled.rollout_batch import RolloutBatch
from mkd.kinds.sampled.rollout_meter import MeasuredTeacher, RolloutMeter, measured
from mkd.kinds.sampled.rollout_stream import RolloutStream
from mkd.kinds.sampled.rollout_teachers import (
    AlignedRollouts,
    ContextRollouts,
    RolloutTeacher,
    SharedRollouts,
)
from mkd.kinds.sampled.sampler.rollouts import Sampling
from mkd.kinds.sampled.sources.known_sources import KNOWN_SOURCES
from mkd.kinds.sampled.sources.text_source import SourceParts
from mkd.kinds.sampled.stop_ids import stop_ids
from mkd.kinds.texts import Texts
from mkd.operations.phases import ROLLOUT, Phases
from mkd.operations.signals import Signals
from mkd.plan.sides import sent_rows
from mkd.resolve.run_plan import Plan
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.train.step import Engine


def build_rollouts(
    plan: Plan,
    engine: Engine,
    state: TrainingState,
    texts: Texts,
    position: TrainingPosition,
    phases: Phases,
    fingerprints: Mapping[str, object],  # of the run
    signals: Signals,
) -> tuple[RolloutStream, RolloutMeter] | tuple[None, None]:
    """Return this rank's batches from `position` on, and the meter of its steps; None without prompts."""
    config, training, rollout = plan.config, plan.config.training, plan.config.rollout
    if texts.prompts is None:
        return None, None
    assert plan.tokenizers is not None, "a run reads text"
    tokenizer = plan.tokenizers.student
    sampling = _sampling(plan, tokenizer)
    resumes = bool(config.checkpoint.load)
    parts = SourceParts(
        plan,
        engine,
        state,
        sampling,
        fingerprints,
        resumes,
        position.iteration,
        tag_names=texts.tag_names,
        is_stopped=lambda: bool(signals.received),
    )
    chosen = KNOWN_SOURCES[rollout.rollout_source]
    source = chosen.build(parts)
    stream_of: type[RolloutStream] = RolloutStream
    rewards: Rewards | RecordRewards | None = texts.rewards
    if not chosen.reads_prompts:
        stream_of, rewards = RecordStream, RecordRewards() if config.grpo.is_on else None
    stream = stream_of(
        source=source,
        context=engine.context,
        prompts=texts.prompts,
        dataset=texts.train_set,
        batch=RolloutBatch.from_config(config, plan.batch.global_batch_size),
        micro_batch_size=plan.batch.micro_batch_size,
        seq_length=training.seq_length,
        pad_id=tokenizer.padding_id(plan.known_ids),
        teachers=_rollout_teachers(plan, texts, texts.prompts, engine.context.document_multiple),
        seed=training.seed,
        shuffle=config.data.shuffle,
        drops_truncated=rollout.rollout_truncated == "drop",
        iteration=position.iteration,
        last_iteration=training.train_iters,
        consumed_prompts=position.consumed_prompts,
        consumed_samples=position.consumed_samples,
        announce=lambda iteration: phases.enter(ROLLOUT, iteration),
        rewards=rewards,
        contexts=_made_contexts(plan, texts.prompts, tokenizer),
        tag_names=texts.tag_names,
        routes=teacher_routes(plan, texts.tag_names, engine.context),
        host_rows=sent_rows(config, engine.context.holds_last_stage),
    )
    return stream, _meter(plan, engine, state, stream, sampling.vocab_size)


def _meter(
    plan: Plan, engine: Engine, state: TrainingState, stream: RolloutStream, vocab_size: int
) -> RolloutMeter:
    teachers = [one for one in engine.teachers if isinstance(one, MeasuredTeacher)]
    meter = RolloutMeter(engine.context, stream, measured(teachers, engine.tags), vocab_size)
    if isinstance(stream, RecordStream):
        meter = RecordMeter.of(meter, plan.scored_ids, next(state.models[0].parameters()).dtype)
    return meter


def _made_contexts(plan: Plan, prompts: PromptSet, tokenizer: Tokenizer) -> MadeContexts | None:
    """Return the maker of prompts with siblings and feedback; None if no teacher has such."""
    assert plan.tokenizers is not None, "a run reads text"
    readers, success = {}, {}
    for one in plan.setups:
        reader, settings = one.prompt_reader(plan.tokenizers), one.settings.context
        if prompts and reader is not None and reader.made and settings is not None:
            readers[one.name], success[one.name] = reader, settings.success
    return MadeContexts(prompts, tokenizer, readers, success) if readers else None


def _sampling(plan: Plan, tokenizer: Tokenizer) -> Sampling:
    rollout, training = plan.config.rollout, plan.config.training
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        stop_ids=stop_ids(plan.student.assets, tokenizer),
        vocab_size=plan.known_ids,
        unused_ids=plan.unused_ids,
        temperature=rollout.rollout_temperature,
        slots=rollout.rollout_slots,
        prefill_tokens=training.seq_length * plan.batch.micro_batch_size,
        seed=training.seed,
    )


def _rollout_teachers(plan: Plan, texts: Texts, prompts: PromptSet, multiple: int) -> list[RolloutTeacher]:
    """Return every teacher's side of the completions."""
    assert plan.tokenizers is not None, "a run reads text"
    ours = plan.tokenizers.student
    found: list[RolloutTeacher] = []
    for text, length in ((one.text, one.seq_length) for one in texts.teachers if one.runs):
        if isinstance(text, SharedTokens):
            found.append(SharedRollouts(length))
            continue
        if text.context is not None and not text.aligns:
            found.append(ContextRollouts(text, prompts, length, multiple))
            continue
        pair = Pair(ours, text.tokenizer, text.alignment, text.reasoning, plan.config.data.append_eod)
        found.append(AlignedRollouts(text, prompts, length, multiple, pair))
    return found
