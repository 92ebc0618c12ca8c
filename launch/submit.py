"""Submit a run to Slurm: check it, write its batch script from slurm.sbatch, pass that to sbatch.

    python launch/submit.py --nodes 4 --partition gpu --time 24:00:00 --config FILE.yaml [--flag value ...]

Everything that is not an option of this tool goes to `mkd train`. Paths are relative to the repository,
where the job runs. The tool needs no torch and runs on a login node in under a second. Exit codes: 0, 64 for
what cannot work, 1 if sbatch refuses.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mkd.config.flags import FlagParser, whole_number
from mkd.config.load import load_config
from mkd.config.schema import Config
from mkd.errors import EXIT_DONE, ErrorList, MkdError, UsageError, collect_error, returns_exit_code
from mkd.kinds.known_kinds import KINDS
from mkd.plan.advice.auto_processes import FLAG, is_open, open_problems
from mkd.plan.checks.problems import find_problems
from mkd.plan.facts import RunFacts
from mkd.plan.sides import processes_apart, student_processes

ROOT = Path(__file__).resolve().parent.parent
SIGNAL_EARLIER_S = 60  # Slurm may send its warning up to this much before the time that was asked for
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
OPTION = re.compile(r"(?P<name>[a-z][a-z0-9-]*)(?:=(?P<value>.+))?", re.DOTALL)
WRITTEN = {  # option of sbatch -> the flag that it is written from
    "job-name": "--job-name",
    "nodes": "--nodes",
    "gpus-per-node": "--gpus-per-node",
    "ntasks-per-node": "--gpus-per-node",
    "cpus-per-task": "--cpus-per-task",
    "time": "--time",
    "partition": "--partition",
    "account": "--account",
    "signal": "--signal-lead-s",
}
PLAIN = re.compile(r"[\w@%+=:,./-]*", re.ASCII)  # what sbatch reads as it stands


@returns_exit_code
def main(argv: list[str]) -> int:
    """Submit the script or print it; return the exit code."""
    own, run = own_flags(argv)
    script = render(own, run)
    if own.dry_run:
        print(script, end="")
        return EXIT_DONE
    try:
        return int(subprocess.run(["sbatch"], cwd=ROOT, input=script, text=True).returncode != 0)
    except FileNotFoundError:
        raise MkdError(
            "there is no sbatch here",
            do="use a login node of the cluster, or add --dry-run",
            code="sbatch-missing",
        ) from None


def own_flags(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the command line into this tool's options and the run's."""
    parser = FlagParser(
        prog="submit.py",
        description=__doc__.splitlines()[0],
        epilog="The flags of mkd train follow, --config FILE.yaml first of all.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nodes",
        type=whole_number,
        default=1,
        metavar="N",
        help="machines, those of --teacher-nodes not included (default: 1)",
    )
    _add_flags_of_teachers(parser)
    parser.add_argument(
        "--gpus-per-node",
        type=partial(whole_number, least=0),
        default=8,
        metavar="N",
        help=(
            "GPUs of a machine, one process each (default: 8). "
            "0 means a CPU run, with as many processes as the environment variable NPROC says"
        ),
    )
    parser.add_argument(
        "--cpus-per-task", type=whole_number, metavar="N", help="cores of a machine (default: slurm.sbatch)"
    )
    parser.add_argument(
        "--time",
        metavar="T",
        help="time limit in Slurm's format: 90, 12:00:00, 2-12 (default: the partition's)",
    )
    parser.add_argument("--partition", metavar="NAME", help="partition (default: the cluster's)")
    parser.add_argument("--account", metavar="NAME", help="account that pays (default: your own account)")
    parser.add_argument(
        "--job-name", metavar="NAME", help="name in the queue (default: the run's name, log.name)"
    )
    parser.add_argument(
        "--signal-lead-s",
        type=whole_number,
        default=120,
        metavar="S",
        help=(
            "seconds before the time limit at which the run is told to save and end. "
            "Must exceed the time of a step and a save (default: 120)"
        ),
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another option of sbatch, such as qos=high; may be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    return parser.parse_known_args(argv)


def _add_flags_of_teachers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--teacher-nodes",
        type=partial(whole_number, least=0),
        default=0,
        metavar="N",
        help=(
            "machines of teachers with --teacher-processes, as the second part of a heterogeneous job "
            "(default: 0, all processes are on --nodes)"
        ),
    )
    parser.add_argument(
        "--teacher-constraint",
        metavar="TEXT",
        help="features of --teacher-nodes, as --constraint of sbatch (default: any machine)",
    )


def render(own: argparse.Namespace, run: list[str]) -> str:
    """Return slurm.sbatch with these options and this run. Raises one ErrorList with all problems."""
    config = load_config(run).config
    of_node = own.gpus_per_node or int(os.environ.get("NPROC", "1"))
    sides = own.nodes * of_node, own.teacher_nodes * of_node
    options = {
        "job-name": config.log.name if own.job_name is None else own.job_name,
        "nodes": own.nodes,
        "gpus-per-node": own.gpus_per_node,
        "cpus-per-task": own.cpus_per_task,
        "time": own.time,
        "partition": own.partition,
        "account": own.account,
        "signal": f"B:USR1@{own.signal_lead_s}",
    }
    options = {name: str(value) for name, value in options.items() if value is not None}
    problems: list[MkdError] = []
    problems += _of_sides(own, config, sides)
    problems += [*_can_go_on(config), *_has_time_to_save(own.time, own.signal_lead_s)]
    problems += [*_can_be_written(options), *_are_options(own.option)]
    if problems:
        raise ErrorList(problems)
    more = {match["name"]: match["value"] for match in map(OPTION.fullmatch, own.option)}
    template = (ROOT / "launch" / "slurm.sbatch").read_text(encoding="utf-8")
    return fill_in({**options, **more}, run, template, _second_part(own))


def _of_sides(own: argparse.Namespace, config: Config, sides: tuple[int, int]) -> list[MkdError]:
    """Return what is wrong with a run on machines of both parts, with these numbers of processes."""
    if is_open(config):  # ranks know the memory that the place of the teacher depends on
        found = list(open_problems(config))
        if own.teacher_nodes:
            why = "the job must know how many processes the teacher has"
            do = f"give --teacher-processes {sides[1]}, or remove --teacher-nodes"
            found.append(UsageError(f"{FLAG} with --teacher-nodes", why, do, code="exclude-each-other"))
        return found
    problems: list[MkdError] = []
    processes = collect_error(problems, lambda: student_processes(config, sum(sides)))
    found = find_problems(RunFacts(config, processes, kinds=KINDS)) if processes else ()
    return [*problems, *found, *_sides_fit(own, processes_apart(config), sides)]


def _sides_fit(own: argparse.Namespace, apart: int, sides: tuple[int, int]) -> list[MkdError]:
    """Check that the machines of both parts, with these numbers of processes, are those of the sides."""
    if own.teacher_constraint is not None and not own.teacher_nodes:
        do = "add --teacher-nodes N, or remove it"
        return [
            UsageError(
                "--teacher-constraint without --teacher-nodes",
                "no machine is for teachers alone",
                do,
                code="add-flag",
            )
        ]
    if not own.teacher_nodes or sides[1] == apart:
        return []
    what = f"--teacher-nodes {own.teacher_nodes} has {sides[1]} processes, --teacher-processes {apart}"
    why = "the machines of the second part are those of the teachers alone"
    do = "change one of them" if apart else "give --teacher-processes, or remove --teacher-nodes"
    return [UsageError(what, why, do, code="numbers-contradict")]


def _second_part(own: argparse.Namespace) -> dict[str, str]:
    """Return the options of the teachers' machines; {} if the job has one part."""
    if not own.teacher_nodes:
        return {}
    options = {
        "nodes": own.teacher_nodes,
        "constraint": own.teacher_constraint,
        "ntasks-per-node": 1,
        "gpus-per-node": own.gpus_per_node,
        "cpus-per-task": own.cpus_per_task,
        "partition": own.partition,
        "account": own.account,
    }
    return {name: str(value) for name, value in options.items() if value is not None}


def fill_in(
    options: dict[str, str | None],
    run: list[str],
    template: str,
    second: dict[str, str],  # options of a second part of the job; {}: there is none
) -> str:
    """Return `template` with `options` as its #SBATCH lines and `run` as arguments."""
    header, body = re.split(r"(?m)^(?=set -euo pipefail$)", template)
    for name, value in options.items():
        line = f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={quoted(value)}"
        header, is_there = re.subn(
            rf"(?m)^#SBATCH --{re.escape(name)}(=.*)?$", lambda _, line=line: line, header
        )
        header += "" if is_there else f"{line}\n"
    if second:
        header += "".join(["#SBATCH hetjob\n", "#SBATCH --exclusive\n"])
        header += "".join(f"#SBATCH --{name}={quoted(value)}\n" for name, value in second.items())
    return f"{header}set -- {shlex.join(run)}\n{body}"


def quoted(value: str) -> str:
    """Quote for a #SBATCH line: a backslash also counts in quotes, and # begins a comment."""
    if PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _can_be_written(options: dict[str, str]) -> list[MkdError]:
    return [
        UsageError(
            f"--{name} {value!r} is empty or has a line break or another character that is not printed",
            "sbatch reads one line an option, and would refuse the script or read another one",
            "give a value of one line",
            code="value-not-valid",
        )
        for name, value in options.items()
        if not value or not value.isprintable()
    ]


def _are_options(texts: list[str]) -> list[MkdError]:
    """Check each --option: it is well formed, and not one that this tool writes and checks itself."""
    problems = []
    for text in texts:
        match = OPTION.fullmatch(text)
        if match is None:
            problems.append(
                UsageError(
                    f"--option {text!r} is no option of sbatch",
                    "",
                    "write NAME=VALUE, or NAME for one without a value",
                    code="value-not-valid",
                )
            )
        elif match["name"] in WRITTEN:
            problems.append(
                UsageError(
                    f"--option {text} would replace what this tool writes and has checked",
                    "whether the run fits its machines, and has time to save, depends on it",
                    f"give {WRITTEN[match['name']]} instead",
                    code="flag-replaced",
                )
            )
        elif match["value"] is not None:
            problems += _can_be_written({match["name"]: match["value"]})
    return problems


def _can_go_on(config: Config) -> list[MkdError]:
    """Check that a requeued job will find its own checkpoints."""
    save, load = config.checkpoint.save, config.checkpoint.load
    problems = []
    if not save or not load or (ROOT / save).resolve() != (ROOT / load).resolve():
        problems.append(
            UsageError(
                f"--save is {save or 'not given'} and --load {load or 'not given'}",
                "a job that goes back into the queue would start from the beginning",
                "give both, with the same folder",
                code="exclude-each-other",
            )
        )
    if config.checkpoint.ckpt_step is not None:
        problems.append(
            UsageError(
                f"--ckpt-step {config.checkpoint.ckpt_step}",
                "each time the job comes back it would resume from that checkpoint again, and never end",
                "copy that checkpoint into a folder of its own, and give that as --load and --save",
                code="exclude-each-other",
            )
        )
    if not config.training.exit_signal_handler:
        problems.append(
            UsageError(
                "--no-exit-signal-handler",
                "the warning before the time limit would kill the run instead of making it save",
                "leave it out",
                code="remove-flag",
            )
        )
    return problems


def _has_time_to_save(time: str | None, lead_s: int) -> list[MkdError]:
    if time is None:
        return []
    limit_s = seconds(time)
    if limit_s is None:
        form = "write minutes (90), h:m:s (12:00:00) or days-hours (2-12)"
        return [UsageError(f"--time {time} is not a time that Slurm reads", "", form, code="value-not-valid")]
    if 0 < limit_s <= lead_s + SIGNAL_EARLIER_S:  # 0: no limit
        return [
            UsageError(
                f"--time {time} leaves no time to train: the run is told to end {lead_s} s before it, "
                f"or up to {SIGNAL_EARLIER_S} s earlier",
                "it would go back into the queue without having done a step",
                "give a longer --time or a shorter --signal-lead-s",
                code="numbers-contradict",
            )
        ]
    return []


def seconds(time: str) -> int | None:
    """Return the seconds of sbatch's time limit: m, m:s, h:m:s, d-h, d-h:m, d-h:m:s.

    None if it is not one.
    """
    match = TIME.fullmatch(time)
    if not match:
        return None
    parts = [int(part) for part in match["parts"].split(":")]
    first = 3600 if match["days"] or len(parts) == 3 else 60
    return 86400 * int(match["days"] or 0) + sum(part * first // 60**i for i, part in enumerate(parts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
