"""Cut a student out of a teacher: fewer layers, narrower ones, or both (docs/make-student.md).

With --data-path the parts to keep are chosen by measurement: layers by the KL to the teacher without them,
channels and attention groups by their activations. Without text, a block in the middle of the layers is
removed. The student is a Hugging Face folder with the teacher's tokenizer, ready for --student-hf.

    mkd make-student --hf TEACHER --out STUDENT --target-params 100M --data-path text.jsonl
    mkd make-student --hf TEACHER --out STUDENT --num-layers 24 --data-path text.jsonl
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from mkd.busy_machine import share_cores
from mkd.commands.one_process import require_one_process
from mkd.config.flags import FlagParser, whole_number
from mkd.errors import returns_exit_code
from mkd.parent_process import STAGE

METHODS = ("block", "one-by-one", "even")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def parameters(text: str) -> int:
    """Parse a number of parameters, such as 100M, as argparse's `type`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.upper())
    number = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters such as 100M or 1.5B")
    return number


def build_parser() -> FlagParser:
    """Build the parser of the command."""
    parser = FlagParser("mkd make-student", __doc__)
    parser.add_argument("--hf", required=True, metavar="DIR_OR_ID", help="Hugging Face folder of the teacher")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the model that --out holds")
    size = parser.add_argument_group("sizes of the student (default: those of the teacher)")
    size.add_argument("--num-layers", type=whole_number, metavar="N", help="decoder layers")
    size.add_argument("--ffn-hidden-size", type=whole_number, metavar="N", help="FFN channels of a layer")
    size.add_argument(
        "--num-query-groups",
        type=whole_number,
        metavar="N",
        help="attention groups: key/value heads, each with its query heads",
    )
    size.add_argument("--hidden-size", type=whole_number, metavar="N", help="hidden channels")
    size.add_argument(
        "--target-params",
        type=parameters,
        metavar="N",
        help="most parameters of the student, such as 100M: remove layers, FFN channels, or some of both, "
        "whichever hurts least; a size that is given stays",
    )
    measure = parser.add_argument_group("measurement")
    measure.add_argument(
        "--data-path", nargs="+", default=(), metavar="FILE", help="files of records, as for training"
    )
    measure.add_argument(
        "--method",
        choices=METHODS,
        default="block",
        help="layers to remove: the contiguous block that hurts least, one after the other, or all but "
        "evenly spaced ones, which measures nothing (default: block)",
    )
    measure.add_argument(
        "--tokens", type=whole_number, default=8192, metavar="N", help="tokens to measure on (default: 8192)"
    )
    measure.add_argument(
        "--seq-length",
        type=whole_number,
        default=256,
        metavar="N",
        help="tokens of a sequence (default: 256)",
    )
    return parser


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Return its exit code."""
    args = build_parser().parse_args(argv)
    require_one_process("make-student")
    from mkd.pruning.request import StudentRequest, check_request
    from mkd.pruning.sizes import Sizes

    sizes = Sizes(
        args.num_layers, args.ffn_hidden_size, args.num_query_groups, args.hidden_size, args.target_params
    )
    text = tuple(args.data_path)
    request = StudentRequest(
        args.hf,
        args.out,
        sizes,
        method=args.method,
        text=text,
        num_tokens=args.tokens,
        seq_length=args.seq_length,
        overwrite=args.overwrite,
    )
    check_request(request)  # before torch is imported, which takes seconds
    share_cores()
    from mkd.platform import detect

    detect()  # before Megatron is imported, to silence its warnings
    from mkd.pruning.student import make_student
    from mkd.run_command import mkd_command, quoted

    make_student(request)
    if STAGE in os.environ:
        return
    data = " ".join(map(quoted, text)) or "FILE.jsonl"
    models = f"--teacher-hf {quoted(args.hf)} --student-hf {quoted(args.out)}"
    print(f"next     {mkd_command()} train {models} --data-path {data} --train-iters N --lr 1e-4")
