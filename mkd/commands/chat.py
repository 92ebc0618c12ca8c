"""Chat with a student, and with its teacher beside it, on a CPU or on GPUs.

    mkd chat runs/qwen
    mkd chat runs/qwen/hf --teacher Qwen/Qwen3-8B

STUDENT and TEACHER are exported folders, hub ids, folders of checkpoints (also those of a run that still
trains: the latest one is read), or log folders of runs. Both run in mkd's own engine, with its chat template
and a cache of keys, values and states. On a terminal the two answers stand in two columns. In a pipe every
line is a message, and answers follow one another. Ctrl-C stops an answer, Ctrl-D leaves; /help lists the
commands.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence

from mkd.busy_machine import share_cores
from mkd.commands.text_flags import (
    loaded_writers,
    models_request,
    num_ranks,
    require_models,
    run_here_or_in_ranks,
    text_parser,
)
from mkd.errors import EXIT_INTERRUPTED, returns_exit_code

MAX_NEW_TOKENS, TEMPERATURE, TOP_P = 512, 0.7, 0.95


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Talk until the person leaves, and return the exit code."""
    parser = text_parser("chat", __doc__, MAX_NEW_TOKENS, TEMPERATURE, TOP_P)
    parser.add_argument(
        "--columns",
        choices=("auto", "on", "off"),
        default="auto",
        help="answers of student and teacher beside each other. auto: on a terminal of 60 columns or more "
        "(default: auto)",
    )
    args = parser.parse_args(argv)
    return run_here_or_in_ranks("chat", args, argv, lambda: chat(args))


def chat(args: argparse.Namespace) -> int:
    """Load the models and talk. Return the exit code."""
    from mkd.chat.generation import Generation

    generation = Generation(args.max_new_tokens, args.temperature, args.top_p, args.seed)
    request = models_request(args)
    require_models(request, generation)
    share_cores()
    from mkd.platform import detect

    platform = detect()  # before Megatron is imported, to silence its warnings
    from mkd.chat.dialogue import Dialogue, Person
    from mkd.chat.interruption import Ranks
    from mkd.chat.views import view_for
    from mkd.chat.writer import open_readers, require_chat

    readers = open_readers(request, platform.is_cuda, num_ranks())
    require_chat(readers)
    with loaded_writers(readers, platform) as writers:
        ranks = Ranks()
        if not ranks.is_first:  # it learns of Ctrl-C from the first one
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        else:
            print("/help lists commands; Ctrl-C stops an answer, Ctrl-D leaves", flush=True)
        view = view_for(args.columns, len(writers))
        code = Dialogue(writers, generation, view, ranks, args.system).run(Person())
    return code if ranks.is_first or code != EXIT_INTERRUPTED else 0
