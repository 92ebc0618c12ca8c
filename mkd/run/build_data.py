"""Build the data sets of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mkd.config.run_files import rule_for_conversations
from mkd.config.schema import Config
from mkd.config.tag_rules import TagRules
from mkd.data.aligned.teacher_side import TeacherText
from mkd.data.build import DataBuilder
from mkd.data.images.conversation import ConversationImages
from mkd.data.packing.pack_settings import PackSettings
from mkd.data.prompts import PromptSet
from mkd.data.quarantine import append
from mkd.data.teacher_input import SharedTokens
from mkd.errors import DataError, Preempted
from mkd.kinds.known_kinds import wanted_records
from mkd.operations.phases import Phases
from mkd.operations.run_folders import cache_folder, log_folder
from mkd.operations.shared_build import SharedBuild, leave_preempted
from mkd.operations.signals import Signals
from mkd.parallel.context import ParallelContext
from mkd.platform import usable_cores
from mkd.resolve.run_plan import Plan
from mkd.resolve.teacher_setup import TeacherSetup
from mkd.tokenizers.tokenizer import Tokenizer

QUARANTINE_FILE = "quarantine.jsonl"  # in the log folder, if there are bad records
# Processes that tokenise. Each reads the whole file, so more of them would wait for reading.
MAX_WORKERS = 16


def quarantine_file(config: Config) -> Path:
    """Return the file that lists bad records, if there are any."""
    return log_folder(config) / QUARANTINE_FILE


def build_data(
    plan: Plan,
    context: ParallelContext,
    setups: Sequence[TeacherSetup] | None = None,  # of the teachers; None: those of the plan
    signals: Signals | None = None,
    phases: Phases | None = None,
    prompts: PromptSet | None = None,  # whose bad records join those of the data in the quarantine file
):
    """Return (training set, held-out set or None), in the tokens of the student and of all teachers.

    Collective. Raises Preempted on all ranks if a rank got a signal while files were tokenised.
    """
    config, data, tokenizers = plan.config, plan.config.data, plan.tokenizers
    assert tokenizers is not None, "a plan without problems has tokenizers"
    build = SharedBuild(context, signals or Signals(), phases or Phases())
    try:
        setups = plan.setups if setups is None else setups
        texts = [one.text for one in setups if one.runs]
        train_set, valid_set = open_data(
            config, tokenizers.student, plan.known_ids, build, texts, tokenizers.images, prompts
        )
        build.end_if_asked()
    except Preempted as stop:
        if context.rank == 0:
            leave_preempted(config.checkpoint.save, stop)
        raise
    if context.rank == 0 and prompts is not None:
        _list_bad_prompts(prompts, config)
    has_tasks = data.eval_multiple_choice or data.eval_completions
    if valid_set is None and config.training.evaluates and not has_tasks:
        paths = " ".join(data.data_path)
        what = f"there is no held-out document: --split {data.split} of {paths} leaves none"
        why = "--eval-interval asks for evaluations"
        do = "give --valid-data-path, a larger second part of --split, or drop --eval-interval"
        raise DataError(what, why, do, code="split-leaves-nothing")
    for one in setups:
        train_set, valid_set = one.attach(config, tokenizers, context, (train_set, valid_set))
    return train_set, valid_set


def _list_bad_prompts(prompts: PromptSet, config: Config) -> None:
    path = quarantine_file(config)
    if not (config.data.data_path or config.data.valid_data_path):  # the list is an earlier run's
        path.unlink(missing_ok=True)
    append(prompts.bad_records, path)


def open_data(
    config: Config,
    tokenizer: Tokenizer,
    vocab_size: int,  # token ids known to all models that read them
    build: SharedBuild,
    teachers: Sequence[TeacherText | SharedTokens] = (),  # one for each teacher
    images: ConversationImages | None = None,  # None: the models read none
    prompts: PromptSet | None = None,  # whose tags are tags of the run, too
):
    """Return (training set, held-out set or None) of the data flags. Collective.

    Without --data-path, which rollouts replace, the training set is None.
    """
    data, context = config.data, build.context
    if not data.data_path and not (data.valid_data_path and config.training.evaluates):
        return None, None
    packing = PackSettings(
        config.training.seq_length,
        data.pack,
        data.overlong,
        context.document_multiple,
        overlong_conversations=rule_for_conversations(data.overlong, data.overlong_conversations),
        max_patches=data.max_patches_per_pack,
    )
    builder = DataBuilder(
        tokenizer,
        vocab_size,
        packing,
        str(cache_folder(config)),
        append_eod=data.append_eod,
        workers=min(MAX_WORKERS, usable_cores()),
        max_bad_records=data.max_bad_records,
        quarantine=str(quarantine_file(config)),
        teachers=teachers,
        images=images,
        records=wanted_records(config),
        tags=TagRules.of(config, prompts.tags if prompts is not None else ()),
        progress=build.progress,
    )
    found = builder.open(
        data.data_path or data.valid_data_path,
        data.valid_data_path if data.data_path else (),
        data.split if data.data_path else None,
        is_builder=context.rank == 0,
        share=build.share,
    )
    return found if data.data_path else (None, found[0])
