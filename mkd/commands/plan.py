"""Plan a run without torch: batch, layouts, stage times, bubble, FLOPs, and memory of every pipeline rank.

    mkd plan --world-size 32 --config configs/qwen3_1.7b_from_8b.yaml [--flag value ...]

It takes the flags of mkd train, except that data and --train-iters may be missing. Models need only
their config.json. Exit codes are those of mkd train.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from mkd.config.flags import FlagParser, whole_number
from mkd.config.load import load_config
from mkd.config.schema import Config
from mkd.errors import ErrorList, MkdError, returns_exit_code
from mkd.kinds.known_kinds import KINDS
from mkd.plan.advice.auto_processes import is_open
from mkd.plan.advice.forecast_text import describe_totals
from mkd.plan.advice.notes import plan_notes, precision_note
from mkd.plan.advice.verdict import describe
from mkd.plan.checks.problems import find_problems
from mkd.plan.facts import RunFacts
from mkd.plan.forecast import Forecast
from mkd.plan.sides import student_processes
from mkd.plan.times.cost import DOCUMENT_LENGTH
from mkd.run.chosen_place import planned_place
from mkd.run.early_checks import find_shape, head_shapes

PLANNED_STEPS = 1000  # of a run without --train-iters


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan."""
    own, rest = own_flags(sys.argv[1:] if argv is None else argv)
    config, chosen = planned(load_config(rest).config), []
    if is_open(config):
        place = planned_place(config, own.world_size, config.device_memory_gib)
        config, chosen = place.apply(config), [place.text]
    forecast = plan(config, own.world_size, own.document_length)
    totals = describe_totals(forecast)
    print("\n".join([*chosen, describe(forecast), totals, *plan_notes(forecast), *precision_note(forecast)]))


def own_flags(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of this tool, and the rest of the command line: the flags of mkd train."""
    parser = FlagParser(
        prog="mkd plan",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.HelpFormatter,
        epilog="The flags of mkd train follow.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "--world-size", type=whole_number, default=1, metavar="N", help="processes of the run, one per GPU"
    )
    parser.add_argument(
        "--document-length",
        type=whole_number,
        default=DOCUMENT_LENGTH,
        metavar="N",
        help=f"tokens of a typical document, for the cost of attention (default: {DOCUMENT_LENGTH}). "
        "A run with --pipeline-layout auto assumes the default; for other documents, give it the layouts "
        "printed here",
    )
    if "--help" in argv:
        parser.print_help()
    return parser.parse_known_args(argv)


def planned(config: Config) -> Config:
    """Return the settings with something in place of what a plan does not need."""
    prompts = ("-",) if config.rollout.is_on else ()
    return replace(
        config,
        dry_run=True,
        training=replace(config.training, train_iters=config.training.train_iters or PLANNED_STEPS),
        data=replace(config.data, data_path=config.data.data_path or ("-",)),
        rollout=replace(config.rollout, prompt_data_path=config.rollout.prompt_data_path or prompts),
    )


def plan(config: Config, world_size: int, document_length: int = DOCUMENT_LENGTH) -> Forecast:
    """Return the forecast of a run on `world_size` processes.

    Raises ErrorList with everything that is wrong.
    """
    config = planned(config)
    problems: list[MkdError] = []
    of_student = student_processes(config, world_size)
    facts = RunFacts(config, of_student, document_length=document_length, kinds=KINDS)
    student = find_shape(problems, config, None)
    facts = facts.with_running([find_shape(problems, config, teacher) for teacher in facts.read_teachers])
    facts = replace(facts, student=student, heads=head_shapes(problems, facts))
    if problems or not facts.is_known:
        raise ErrorList([*problems, *find_problems(facts)])
    return Forecast.from_facts(facts)
