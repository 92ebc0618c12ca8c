"""Set up the records of agents in a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mkd.checkpoint.folders import oldest_iteration
from mkd.config.tag_rules import taught_tags
from mkd.kinds.sampled.records.agent_record import RecordLimits
from mkd.kinds.sampled.records.record_folder import RecordFolder
from mkd.kinds.sampled.records.record_inbox import RecordInbox
from mkd.kinds.sampled.records.record_queue import RecordQueue
from mkd.kinds.sampled.records.record_source import RecordSource
from mkd.kinds.sampled.records.taken_steps import TakenSteps, new_run_name
from mkd.kinds.sampled.rollout_batch import RolloutBatch
from mkd.kinds.sampled.sources.text_source import SourceParts
from mkd.operations.run_folders import log_folder

REFUSED_FILE = "refused_records.jsonl"  # in the log folder, if a record was bad


def build_record_source(parts: SourceParts) -> RecordSource:
    """Return the source. Collective."""
    plan, engine = parts.plan, parts.engine
    source = RecordSource(
        context=engine.context,
        sampling=parts.sampling,
        parameters_gathered=engine.parameters_gathered,
        export=parts.export,
        weights=log_folder(plan.config) / "rollout_weights",
        inbox=None,
    )
    if engine.context.rank == 0:
        source.inbox = _inbox(parts)
    source.start()
    return source


def _inbox(parts: SourceParts) -> RecordInbox:
    plan, config = parts.plan, parts.plan.config
    rollout, save = config.rollout, config.checkpoint.save
    steps = None
    if save:
        oldest = partial(oldest_iteration, Path(save))
        steps = TakenSteps(Path(save) / "rollouts", parts.digest, rollout.max_staleness, oldest)
    limits = RecordLimits(
        run=steps.begin(parts.resumes, parts.last_iteration) if steps else new_run_name(),
        vocab_size=plan.known_ids,
        seq_length=config.training.seq_length,
        group_size=rollout.samples_per_prompt,
        needs_reward=config.grpo.is_on,
        tags=parts.tag_names,
        teachers={
            one.name: one.settings.context.missing == "skip" for one in plan.setups if one.settings.context
        },
        taught={one.name: tags for one in plan.setups if (tags := taught_tags(config, one.name)) is not None},
    )
    folder = Path(rollout.rollout_records or "")
    folder.mkdir(parents=True, exist_ok=True)
    return RecordInbox(
        folder=RecordFolder(folder),
        queue=RecordQueue(rollout.max_staleness, config.training.seq_length),
        limits=limits,
        steps=steps,
        groups=RolloutBatch.from_config(config, plan.batch.global_batch_size).prompts,
        timeout_s=rollout.rollout_records_timeout_s,
        max_bad_records=config.data.max_bad_records,
        refused_file=log_folder(config) / REFUSED_FILE,
        is_stopped=parts.is_stopped,
    )
