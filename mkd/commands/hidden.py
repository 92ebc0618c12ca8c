"""Export a teacher's final hidden states once, to train from with `mkd train --teacher-hidden DIR`.

    mkd hidden --out DIR --teacher-hf TEACHER --student-hf STUDENT --data-path ... --bf16
    torchrun --nproc-per-node N -m mkd hidden --out DIR --config RUN.yaml

The folder has the states of every loss token, in the precision of the run, and the teacher's head: the loss
is that of the running teacher, with any divergence and temperature. `mkd plan` prints the size.

All other flags, and the exit codes, are those of mkd train, but a signal ends it at once. The relevant
ones are --teacher-hf or --teacher-load, the data flags, --seq-length, --bf16, --micro-batch-size and the
parallel sizes. Give the data flags and the --student-hf of the run that will train from the export. To resume
an interrupted export, run the same command again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkd.commands.cache_flags import cache_parser, export
from mkd.errors import returns_exit_code

if TYPE_CHECKING:  # they load torch
    from mkd.run.stored.cache_description import ExportSettings
    from mkd.run.stored.hidden_export import HiddenExport


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return (the export's own flags, those of the run)."""
    return cache_parser("mkd hidden", __doc__, samples_per_shard=32).parse_known_args(argv)


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    """Run the export and return the exit code."""
    args, rest = parse(argv)

    def build(settings: ExportSettings) -> HiddenExport:
        from mkd.run.stored.hidden_export import HiddenExport

        return HiddenExport(settings)

    def text(meta: Any) -> str:
        return f"{meta.row_bytes} bytes for each loss token"

    export(args, rest, build, text)
