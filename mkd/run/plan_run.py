"""Plan a run before processes communicate: models, batch and layouts, from files and flags alone."""

from __future__ import annotations

from dataclasses import replace

from mkd.config.data_files import data_paths
from mkd.config.schema import Config
from mkd.errors import ErrorList, MkdError, collect_error
from mkd.evaluation.task_evaluator import task_problems
from mkd.kinds.known_kinds import KINDS, device_problems, teacher_setup, wanted_records
from mkd.kinds.placed.choice import flag_of
from mkd.log.loggers.known_loggers import missing_packages
from mkd.operations.console import LOG
from mkd.operations.disk import disk_problems, writes_of
from mkd.operations.profiling import profile_problems
from mkd.operations.run_folders import export_problems, requeue_problems, start_problems
from mkd.plan.checks.expert_limits import require_expert_layers
from mkd.plan.checks.problems import find_problems
from mkd.plan.checks.vision_limits import require_deepstack_layers
from mkd.plan.facts import RunFacts
from mkd.plan.sides import apart_teachers, is_layout_whole, side_of_teacher
from mkd.platform import gpu_gib, processes_of_machine
from mkd.resolve.model_source import ModelSource, locate_model
from mkd.resolve.preflight import data_problems, open_tokenizers
from mkd.resolve.run_plan import Plan
from mkd.resolve.trained_ends import ends_of_stores, trained_ends
from mkd.run.one_model import plan_model

KEPT_STOPS = "note: no token that ends a text has loss: exports stop where the student's own files do"


def plan_run(config: Config, world_size: int) -> Plan:
    """Resolve models, batch and layouts from files and flags alone. Raises one ErrorList."""
    problems: list[MkdError] = []
    facts = RunFacts(config, world_size, kinds=KINDS)
    student = locate_model(problems, "student", config.student)
    shape = student.shape if student else None
    facts = replace(facts, student=shape)
    sources: list[ModelSource | None] = []
    if config.needs_models:
        teachers = zip(facts.roles, config.teachers, strict=True)
        sources = [locate_model(problems, role, one) for role, one in teachers]
    setups = [teacher_setup(problems, facts, index, source) for index, source in enumerate(sources)]
    readers = [sources[index] for index in sorted((*facts.read_teachers, *apart_teachers(config)))]
    sources = [sources[index] for index in facts.read_teachers]
    facts = facts.with_running(source.shape if source else None for source in sources)
    stored = [setups[index] for index in facts.head_numbers]
    facts = replace(facts, heads=tuple(one.head_shape if one else None for one in stored))
    problems += find_problems(facts)
    problems += teacher_side_problems(config, world_size)
    problems += facts.machine_problems(processes_of_machine(world_size))
    problems += device_problems(facts)
    tokenizers = open_tokenizers(problems, facts, student, readers)
    paths = data_paths(problems, config.data)
    problems += data_problems(paths, tokenizers, config, wanted_records(config), facts.roles)
    for kind in KINDS:
        problems += kind.file_problems(facts, tokenizers, student, readers)
    problems += task_problems(config)
    problems += missing_packages(config.log)
    problems += profile_problems(config.log, world_size)
    problems += [*start_problems(config.checkpoint), *requeue_problems(config)]
    exports = student is not None and config.checkpoint.export_hf
    carried = collect_error(problems, lambda: student.carried_bytes) if exports else 0
    problems += disk_problems(list(writes_of(config, shape, paths, carried or 0)))
    read = [source.assets for source in (student, *readers) if source]
    read += [tokenizers.source] if tokenizers and tokenizers.source else []
    problems += export_problems(config.checkpoint, read)
    if problems:
        raise ErrorList(problems)
    assert student is not None, "a student without a source is a problem"
    require_expert_layers(facts)
    require_deepstack_layers(facts)
    return Plan(
        facts=facts,
        student=student,
        teachers=tuple(sources),
        setups=tuple(setups),
        tokenizers=tokenizers,
        trained_ends=trained_ends(config, tokenizers, wanted_records(config)),
        gpu_gib=gpu_gib(),
    )


def teacher_side_problems(config: Config, student_processes: int) -> list[MkdError]:
    """Return the problems of the teachers on processes of their own, each in its layout."""
    found: list[MkdError] = []
    first = student_processes
    for index, teacher in apart_teachers(config).items():
        problems: list[MkdError] = []
        if is_layout_whole(teacher):  # else its kind reports it
            plan_model(problems, side_of_teacher(config, index), teacher.processes, index, first)
        first += teacher.processes
        found += [one.located(flag_of(index, "processes")) for one in problems]
    return found


def with_ends_of(train_set, plan: Plan) -> Plan:
    """Return the plan whose exports stop where all of the tokenised texts end.

    Before they are tokenised, only their first records are known.
    """
    if train_set is None or plan.tokenizers is None:
        return plan
    exact = replace(plan, trained_ends=ends_of_stores(train_set, plan.tokenizers))
    before, now = plan.stop_notes(), exact.stop_notes()
    for line in (now or [KEPT_STOPS]) if now != before else ():
        LOG.info(line)
    return exact


def with_seen_parts(train_set, plan: Plan) -> Plan:
    """Return the plan whose student trains its text model alone if the training data has no image.

    Projector and tower would have no gradient, and weight decay would make them smaller.
    """
    config, shape = plan.config, plan.student.shape
    sees_images = train_set is not None and any(one.store.images for one in train_set.members)
    if shape.vision is None or sees_images or config.student.train_parts == ("text",):
        return plan
    LOG.info("no training text has an image: the student trains as with --student-train-parts text")
    frozen = replace(config, student=replace(config.student, train_parts=("text",)))
    return replace(plan, facts=replace(plan.facts, config=frozen))
