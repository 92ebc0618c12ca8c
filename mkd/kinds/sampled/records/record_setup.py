"""Set up the records of agents in a run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from mkd.checkpoint.distributed import TrainingState
from mkd.checkpoint.folders import saved_iterations
from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_writer import export_hf
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
from mkd.parallel.context import ParallelContext
from mkd.resolve.run_plan import Plan

REFUSED_FILE = "refused_records.jsonl"  # in the log folder, if a record was bad


def build_record_source(parts: SourceParts) -> RecordSource:
    """Return the source. Collective."""
    plan, engine, state = parts.plan, parts.engine, parts.state
    assets = replace(plan, trained_ends=()).assets  # the writer stops where the student does
    source = RecordSource(
        context=engine.context,
        sampling=parts.sampling,
        parameters_gathered=engine.parameters_gathered,
        export=partial(_export, plan, assets, state, engine.context),
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
        known = json.dumps(parts.fingerprints, sort_keys=True, default=str)
        digest = hashlib.sha256(known.encode()).hexdigest()
        folder = Path(save)
        oldest = partial(_oldest_checkpoint, folder)
        steps = TakenSteps(folder / "rollouts", digest, rollout.max_staleness, oldest)
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


def _export(
    plan: Plan, assets: HFAssets, state: TrainingState, context: ParallelContext, folder: Path
) -> None:
    models = [(part, part.first_layer) for part in state.models]
    export_hf(models, plan.student.shape, folder, context=context, assets=assets)


def _oldest_checkpoint(folder: Path) -> int:
    """Return the iteration of the first checkpoint that a run could resume from, 0 without any."""
    found = saved_iterations(folder)
    return min((int(one.name.removeprefix("iter_").split(".")[0]) for one in found), default=0)
