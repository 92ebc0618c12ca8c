"""Distil a student in one go: choose the settings, cut the student if asked, train, export, check, report.

    mkd distill Qwen/Qwen3-8B Qwen/Qwen3-1.7B-Base text.jsonl
    mkd distill teacher/ layers:12 text.jsonl --out runs/small
    mkd distill --out runs/small                  # again, after a stop or a kill

The arguments are those of `mkd init`, whose settings it takes. Every stage is a command of mkd, which is
printed before it runs. Started again with the same --out, it resumes where it was: stages that are done are
skipped, and training resumes from its last checkpoint. Between stages you may edit run.yaml. With files of
--eval-completions or --eval-multiple-choice, teacher and student are scored on them. Exit codes are those
of the stage that ended.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkd.commands.init import add_arguments, ask_for_rest, build_request, divide
from mkd.commands.one_process import require_one_process
from mkd.config.flags import FlagParser
from mkd.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, returns_exit_code

if TYPE_CHECKING:
    from mkd.recipe.distill_stages import Stage, State
    from mkd.recipe.first_request import Request

RANKS = "run it without torchrun: its stages start one process for each of --gpus themselves"
STOPS = (EXIT_PREEMPTED, EXIT_INTERRUPTED)  # exit codes of a stage that a signal has ended


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run all stages that are not done. Return the exit code of the one that failed."""
    parser = FlagParser("mkd distill", __doc__, allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument("--plan-only", action="store_true", help="choose the settings and print the stages")
    own, rest = divide(argv, parser)
    args = parser.parse_args(own)
    require_one_process("distill", RANKS)
    from mkd.recipe.distill_stages import only_one
    from mkd.recipe.first_request import default_folder

    if not (args.out and is_bare(args)):
        ask_for_rest(args)
        args.out = args.out or default_folder(args.teacher, args.student)
    with only_one(args.out):
        request, state = begin(args, rest)
        return run_stages(request, state, args.plan_only)


def is_bare(args: Namespace) -> bool:
    """Return True if neither models nor text are given: the folder has them."""
    return not (args.teacher or args.student or args.data)


def begin(args: Namespace, rest: Sequence[str]) -> tuple[Request, State]:
    """Return the request and the state: settings are chosen and written now, or the folder has them."""
    from mkd.recipe.distill_stages import State

    state = State.read(args.out)
    if state is None and is_bare(args):
        ask_for_rest(args)
    if state is None:
        request = build_request(args, rest)
        return request, first_state(request, rest)
    restore(args, state)
    state.require_same(arguments(args, args.gpus, args.gpu_memory_gib, rest or state.asked["flags"]))
    print(f"resuming in {args.out}")
    return build_request(args, state.asked["flags"]), state


def first_state(request: Request, rest: Sequence[str]) -> State:
    """Choose and write the settings, or take those of `mkd init`. Write and return the state.

    Raises UsageError if the folder has settings that do not fit, or holds another run.
    """
    from mkd.recipe.distill_stages import STATE, State, stages_of
    from mkd.recipe.first_run import CONFIG, choose_first_run
    from mkd.recipe.folder_in_use import check_no_run, check_no_student, check_settings, is_cut

    path, is_chosen = request.out / CONFIG, (request.out / CONFIG).exists()
    check_no_run(request, exports_too=True)
    if is_chosen:
        request.check()
        check_settings(request, path)
        print(f"the settings are those of {path}")
    else:
        check_no_student(request)
        run = choose_first_run(request)
        run.write()
        print(run.summary(shows_commands=False))
    state = State(request.out / STATE, arguments(request, request.gpus, request.gpu_gib, rest), {})
    state.write()
    if is_chosen and request.sizes is not None and is_cut(Path(request.student_folder)):
        cut = next(stage for stage in stages_of(request) if stage.name == "student")
        state.done(cut, time.monotonic())  # with the command that `mkd init` prints
    return state


def arguments(
    given: Namespace | Request, gpus: int | None, gpu_memory_gib: float | None, rest: Sequence[str]
) -> dict[str, Any]:
    """Return what must not change between two starts, as JSON."""
    models = {"teacher": given.teacher, "student": given.student, "data": list(given.data)}
    machine = {"gpus": gpus, "gpu_memory_gib": gpu_memory_gib if gpus else None}
    return models | machine | {"flags": list(rest), "folder": str(Path.cwd())}


def restore(args: Namespace, state: State) -> None:
    """Take the arguments of the first start for those that are not given."""
    if is_bare(args):
        for name in ("teacher", "student", "data"):
            setattr(args, name, state.asked[name])
    for name in ("gpus", "gpu_memory_gib"):
        if getattr(args, name) is None:
            setattr(args, name, state.asked[name])


def run_stages(request: Request, state: State, plan_only: bool) -> int:
    """Run the stages that are not done, each as a command of its own."""
    from mkd.operations.launch.child_command import ChildCommands
    from mkd.recipe.distill_stages import stages_of

    stages, commands, has_changed = stages_of(request), ChildCommands(), False
    with commands.signals_forwarded():
        for number, stage in enumerate(stages, 1):
            head = f"\n[{number}/{len(stages)}] {stage.title}"
            if state.is_done(stage) and not has_changed:
                print(f"{head}: done")
                continue
            if stage.skipped:
                print(f"{head}: skipped, because {stage.skipped}")
                continue
            print(f"{head}\n  {command_line(stage)}", flush=True)
            if plan_only:
                continue
            started = time.monotonic()
            code = commands.run(stage.words)
            if stage.may_fail and code not in (EXIT_DONE, *STOPS):
                print(f"the stage {stage.name} ended with {code}: the others do not need it", flush=True)
                continue
            if code != EXIT_DONE:
                print(f"\n{why_not(stage, code)}", flush=True)
                return code
            state.done(stage, started)
            has_changed = has_changed or stage.name in ("student", "train")  # the later stages read it
    print("" if plan_only else f"\n{summary(request, state)}")
    return EXIT_DONE


def command_line(stage: Stage) -> str:
    """Return a stage's command, to copy."""
    from mkd.run_command import mkd_command, quoted

    return f"{mkd_command()} {' '.join(map(quoted, stage.words))}"


def why_not(stage: Stage, code: int) -> str:
    """Return what a stage's exit code means, and what to do."""
    again = "start the same command again: it resumes here"
    if code in STOPS:
        return f"stopped in the stage {stage.name}; {again}"
    return f"the stage {stage.name} ended with {code}: mend what its error says, then {again}"


def summary(request: Request, state: State) -> str:
    """Return what has come out, and the next commands."""
    from mkd.config.load import load_config
    from mkd.human import duration
    from mkd.log.records import read_records
    from mkd.recipe.first_run import CONFIG
    from mkd.run.end_text import held_out_rows
    from mkd.run_command import mkd_command, quoted

    path = request.out / CONFIG
    checkpoint = load_config(["--config", str(path)]).config.checkpoint
    seconds = {name: stage["seconds"] for name, stage in state.stages.items()}
    times = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    total = duration(sum(seconds.values()))
    rows = {"student": str(checkpoint.export_hf), **dict(held_out_rows(read_records(str(checkpoint.save))))}
    for role in ("teacher", "student"):
        tasks = request.out / f"tasks-{role}.json"
        if tasks.exists():
            scores = json.loads(tasks.read_text(encoding="utf-8"))
            shown = (f"{key} {value:.4g}" for key, value in scores.items() if isinstance(value, float))
            rows[f"tasks of the {role}"] = ", ".join(shown)
    rows |= {"report": f"{checkpoint.save}/report.html", "settings": str(path), "time": f"{total}: {times}"}
    width, mkd, export = max(map(len, rows)), mkd_command(), quoted(str(checkpoint.export_hf))
    lines = [
        "the student is distilled",
        *(f"  {name:{width}}  {text}" for name, text in rows.items()),
        "next:",
    ]
    lines.append(f"  {mkd} chat {export} --teacher {quoted(request.teacher)}    # talk with both")
    lines.append(f"  {mkd} serve-check {export}    # a server computes the same")
    lines.append(f"  {mkd} evaluate --student-hf {export} --completions FILE.jsonl    # your own task")
    lines.append(f"  {mkd} train --config {quoted(path)} --train-iters N    # more steps, N in all")
    return "\n".join(lines)
