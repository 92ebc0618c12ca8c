"""Show training data as models see it: packs with documents and masks, or the same text in two tokenizers.

    mkd data preview a.jsonl --student MODEL_DIR --seq-length 2048 [--limit 3] \\
        [--histogram out.png] [--picture pack.png]
    mkd data preview a.jsonl --student MODEL_DIR --seq-length 2048 --samples 17 4
    mkd data preview --align a.jsonl --student MODEL_DIR --teacher MODEL_DIR [--limit 3]
    mkd data preview a.jsonl --student MODEL_DIR --context '{prompt} Solution: {solution}' [--limit 3]
    mkd data preview prompts.jsonl --student MODEL_DIR --context '{prompt} {sibling}' --prompts

In packs, tokens with loss are green and others grey (without colours: in parentheses), and conversations
have a line for each message, after its role. The fraction of loss tokens, the packing efficiency and the
lengths of documents follow. --align shows aligned chunks in two colours, --context what a teacher with a
context reads, whose tokens without loss are in parentheses. Colours appear on terminals unless
NO_COLOR is set, and with --color. `mkd inspect --input PATH` is the same command.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from mkd.commands.chat_flags import add_chat_flags, chat_of, require_records
from mkd.config.flags import FlagParser, add_overwrite, require_new_file, whole_number
from mkd.config.run_files import OVERLONG, OVERLONG_CONVERSATIONS, PACKINGS, rule_for_conversations
from mkd.errors import DataError, UsageError, returns_exit_code

if TYPE_CHECKING:  # libraries that take seconds are imported after the arguments are parsed
    from mkd.data.aligned.context_records import ContextTemplate
    from mkd.data.batch import Pack
    from mkd.data.dataset import BlendedDataset
    from mkd.data.records.kinds import Record
    from mkd.data.records.rows import Row
    from mkd.tokenizers.tokenizer import Tokenizer
    from mkd.xtoken import AlignedText

TOKENIZER = "folder or Hub id of a model, a SentencePiece .model file, or a .tiktoken rank file"


def build_parser(name: str = "mkd inspect") -> argparse.ArgumentParser:
    parser = FlagParser(name, __doc__)
    add = parser.add_argument
    add("path", nargs="?", metavar="PATH", help="same as --input")
    add(
        "--input",
        metavar="PATH",
        help="path of records, as of --data-path: a file, a folder, a pattern or a data set of the hub. "
        "Packs may also come from the prefix of a tokenised .bin/.idx pair",
    )
    add("--student", required=True, metavar="TOKENIZER", help=TOKENIZER)
    add(
        "--limit",
        type=partial(whole_number, least=0),
        default=3,
        metavar="N",
        help="packs or records to show (default: 3)",
    )
    add(
        "--samples",
        type=int,
        nargs="+",
        metavar="N",
        help="packs to show instead of the first ones, by their numbers in non_finite.jsonl or "
        "loss_spikes.jsonl of a run. Give the run's data flags, and its one --data-path as --input",
    )
    add("--color", action="store_true", help="use colours even if the output is not a terminal")
    add("--seq-length", type=whole_number, default=2048, metavar="N", help="tokens of a pack (default: 2048)")
    add("--pack", default="bfd", choices=PACKINGS, help="same as in training (default: bfd)")
    add("--overlong", default="split", choices=OVERLONG, help="same as in training (default: split)")
    add("--overlong-conversations", choices=OVERLONG_CONVERSATIONS, help="same as in training")
    add(
        "--split",
        default="1",
        metavar="A,B,C",
        help="same as in training; packs for training are shown (default: all documents)",
    )
    add(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="same as in training (default: yes)",
    )
    add("--max-bad-records", type=int, default=0, metavar="N", help="same as in training (default: 0)")
    add(
        "--data-cache-path", metavar="DIR", help="folder of a run's tokenised text (default: a temporary one)"
    )
    _add_picture_flags(parser)
    _add_conversation_flags(add)
    _add_alignment_flags(add)
    return parser


def _add_picture_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--picture",
        metavar="PNG",
        help="file to draw the shown packs to: tokens in boxes, and images as the model sees them with the "
        "squares of their tokens (needs Pillow)",
    )
    add("--histogram", metavar="PNG", help="file to draw the lengths of documents to (needs matplotlib)")
    add_overwrite(parser, "--picture", "--histogram")


def _add_conversation_flags(add: Callable[..., object]) -> None:
    add_chat_flags(add)
    add("--image-root", metavar="DIR", help="same as in training")
    add("--max-image-pixels", type=int, default=1 << 26, metavar="N", help="same as in training")
    add("--max-image-side", type=int, metavar="N", help="same as in training")
    add("--max-patches-per-pack", type=int, metavar="N", help="same as in training")


def _add_alignment_flags(add: Callable[..., object]) -> None:
    add("--align", action="store_true", help="show the aligned chunks of each record instead of packs")
    add("--teacher", metavar="TOKENIZER", help="teacher's tokenizer, for --align")
    add("--mode", default="byte_offset", help="alignment: byte_offset or dp (default: byte_offset)")
    add(
        "--reasoning",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="align reasoning of conversations too (default: yes)",
    )
    user = "`user` of a teacher's context: show what the student and this teacher read of each record"
    add("--context", metavar="TEXT", help=user)
    add("--context-system", metavar="TEXT", help="system message of that context, its `system`")
    prompts = "the records are prompts of --prompt-data-path, which the student completes (with --context)"
    add("--prompts", action="store_true", help=prompts)


def aligned_records(
    args: argparse.Namespace, student: Tokenizer, teacher: Tokenizer
) -> Iterator[tuple[str, AlignedText]]:
    """Yield (file and row number, alignment) of the first records.

    Raises MkdError that names file and row.
    """
    from mkd.data.aligned.context_records import context_record
    from mkd.data.files.named_files import named_files
    from mkd.data.prompt_readers import PromptReader, prompt_sides
    from mkd.data.prompts import parse_prompt
    from mkd.data.records.parsing import parse_row
    from mkd.data.records.rows import read_rows
    from mkd.data.records.wanted import WantedRecords

    files = named_files(args.input, "--input").at_hand()
    rows = ((file, *row) for file in files for row in read_rows(file))
    template = context_template(args)
    wanted = WantedRecords(context=template.keys if template else ())
    if template is not None:
        require_keys(args, template, (row for file in files for _, row in read_rows(file)))
    for file, number, row in islice(rows, args.limit):
        try:
            if args.prompts:
                prompt, fields = parse_prompt(row, wanted.context)
                yield f"{file}:{number}", prompt_sides(prompt, fields, PromptReader(student, template))
                continue
            record = parse_row(row, wanted)
            if template is None:
                yield f"{file}:{number}", align_record(record, args, student, teacher)
            else:
                yield f"{file}:{number}", context_record(record, student, args.append_eod, template)
        except DataError as error:
            raise error.located(f"{file}:{number}") from error


def context_template(args: argparse.Namespace) -> ContextTemplate | None:
    """Return the context to show; None without --context. Raises UsageError if it is no template."""
    from mkd.config.prompt_template import template_fields
    from mkd.data.aligned.context_records import ContextTemplate

    if args.context is None:
        return None
    for text in (args.context, args.context_system or ""):
        try:
            template_fields(text)
        except ValueError as error:
            what, why = f"--context is not a template: {error}", "its fields are filled from records"
            do = "write {prompt}, {KEY} of a record, and {{ and }} for braces"
            raise UsageError(what, why, do, code="value-not-valid") from error
    return ContextTemplate("shown", args.context, args.context_system, may_miss=True)


def require_keys(args: argparse.Namespace, template: ContextTemplate, rows: Iterator[Row]) -> None:
    """Raise DataError for a field of the context that no record has, because a run would end there too.

    It looks at the first records. Records that are not valid are left out here, and those that bring the
    teacher's prompt themselves need no fields.
    """
    from mkd.config.prompt_template import MADE, PROMPT
    from mkd.data.first_records import LOOKED_AT
    from mkd.data.prompts import parse_prompt
    from mkd.data.records.parsing import parse_row
    from mkd.data.records.rows import raw_fields
    from mkd.data.records.wanted import WantedRecords

    # What a step of sampling makes for prompts is in no record.
    made = dict.fromkeys(MADE, ".") if args.prompts else {}
    wanted = WantedRecords(context=template.keys)
    at_most, known, lacks = max(LOOKED_AT, args.limit), dict[str, None](), False
    first = list(islice(rows, at_most))
    for row in first:
        with suppress(DataError):
            known |= {key: None for key, value in raw_fields(row).items() if value is not None}
            if args.prompts:
                prompt, fields = parse_prompt(row, wanted.context)
                lacks |= template.in_place_of(prompt, {**fields, **made}) is None
            else:
                lacks |= template.prompt_of(parse_row(row, wanted)) is None
    missing = [one for one in template.fields if one not in {PROMPT, *made, *known}]
    if not (lacks and missing):
        return
    names = " or ".join(missing)
    which = "no record" if len(first) < at_most else f"none of the first {at_most} records"
    nearest = [near for one in missing for near in get_close_matches(one, known, 1, cutoff=0.75)]
    raise DataError(
        f"{which} of {args.input} has {names}",
        f"the context has {', '.join(f'{{{one}}}' for one in missing)}, so the teacher has nothing to read",
        f"write {{{nearest[0]}}} in the context, or add {names} to the records"
        if nearest
        else f"name one of their keys in the context ({', '.join(known)}), or add {names} to the records",
        code="record-value-not-valid",
    )


def align_record(
    record: Record, args: argparse.Namespace, student: Tokenizer, teacher: Tokenizer
) -> AlignedText:
    from mkd.data.aligned.aligned_documents import align_record as align_given
    from mkd.data.aligned.aligned_ids import Pair
    from mkd.xtoken import align, align_chat, align_completion

    if record.kind == "messages":
        return align_chat(student, teacher, record.values[0], reasoning=args.reasoning, mode=args.mode)
    if record.kind == "prompt-completion":
        return align_completion(student, teacher, *record.values, mode=args.mode)
    if record.kind != "text":
        pair = Pair(student, teacher, args.mode, args.reasoning, append_eod=False)
        return align_given(record, pair)
    return align(student, teacher, record.values[0], mode=args.mode)


def show_alignment(args: argparse.Namespace, colour: bool) -> None:
    """Print the aligned chunks of the first records, or what a teacher with a context reads."""
    from mkd.tokenizers.load import open_tokenizer
    from mkd.xtoken.align.align_view import view_alignment

    if args.prompts and args.context is None:
        what, why = "--prompts without --context", "it shows what a teacher with a context reads"
        raise UsageError(what, why, "add --context TEXT", code="add-flag")
    if args.context is not None and args.teacher:
        what, why = "--teacher with --context", "a teacher with a context is shown with the student's tokens"
        raise UsageError(what, why, "leave one of them out", code="remove-flag")
    args.teacher = args.student if args.context is not None else args.teacher
    if not args.teacher:
        raise UsageError(
            "--align needs --teacher",
            "it compares the tokens of two models",
            "add --teacher TOKENIZER",
            code="add-flag",
        )
    if args.max_bad_records:
        raise UsageError(
            f"--max-bad-records has no effect with {'--align' if args.context is None else '--context'}",
            "it shows the records as they are",
            "leave it out",
            code="remove-flag",
        )
    chat = chat_of(args)
    student, teacher = open_tokenizer(args.student, chat), open_tokenizer(args.teacher, chat)
    for place, aligned in aligned_records(args, student, teacher):
        print(f"{place}: {view_alignment(aligned, student, teacher, colour=colour)}\n")


def show_packs(args: argparse.Namespace, colour: bool) -> None:
    """Tokenise and pack the file as training does; print the first packs and a summary of all."""
    from mkd.data.build import DataBuilder
    from mkd.data.chat_roles import role_headers
    from mkd.data.images.conversation import image_reader
    from mkd.data.pack_view import document_lengths, draw_lengths, summarise, view_pack
    from mkd.data.packing.pack_settings import PackSettings
    from mkd.report.curves import new_figure, save_figure
    from mkd.tokenizers.load import open_tokenizer, require_marks

    figure = new_figure(Path(args.histogram), "--histogram") if args.histogram else None
    if args.picture:
        require_pillow(args.picture)
    require_records(args, args.input)
    chat = chat_of(args)
    tokenizer = open_tokenizer(args.student, chat)
    require_marks(tokenizer, args.student, chat)
    headers = role_headers(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        packing = PackSettings(
            args.seq_length,
            args.pack,
            args.overlong,
            overlong_conversations=rule_for_conversations(args.overlong, args.overlong_conversations),
            max_patches=args.max_patches_per_pack,
        )
        limits = args.image_root, args.max_image_pixels, args.max_image_side
        builder = DataBuilder(
            tokenizer,
            tokenizer.vocab_size,
            packing,
            args.data_cache_path or folder,
            append_eod=args.append_eod,
            max_bad_records=args.max_bad_records,
            images=image_reader(args.student, tokenizer, *limits),
        )
        dataset, _ = builder.open([args.input], split=args.split)
        for index in wanted_packs(args, len(dataset)):
            print(view_pack(dataset[index], tokenizer, colour=colour, headers=headers) + "\n")
        if args.picture:
            packs = [dataset[index] for index in wanted_packs(args, len(dataset))]
            draw_packs(args.picture, packs, dataset, tokenizer)
        print(*(line.removeprefix(f"{folder}/") for line in summarise(dataset)), sep="\n")
        if figure is not None:
            draw_lengths(document_lengths(dataset), args.seq_length, figure)
            figure.set_size_inches(8, 4)
            save_figure(figure, Path(args.histogram), "--histogram")


def require_pillow(picture: str) -> None:
    """Raise UsageError if Pillow is missing."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        what, do = f"--picture {picture} needs Pillow", "pip install 'megatron-kd[images]'"
        raise UsageError(what, str(error), do, code="package-missing") from error


def draw_packs(picture: str, packs: Sequence[Pack], dataset: BlendedDataset, tokenizer: Tokenizer) -> None:
    """Draw packs to a file. Raises UsageError if the file cannot be written."""
    from mkd.data.pack_view import PackPicture

    drawn = PackPicture(tokenizer, dataset.images).draw(packs)
    try:
        drawn.save(picture, "PNG")
    except OSError as error:
        what = f"{picture} cannot be written: {error.strerror or error}"
        do = "name a file in a folder that exists with --picture"
        raise UsageError(what, "", do, code="not-writable") from error


def wanted_packs(args: argparse.Namespace, num_packs: int) -> Sequence[int]:
    """Return the numbers of the packs to show. Raises UsageError for a pack that does not exist."""
    if args.samples is None:
        return range(min(args.limit, num_packs))
    beyond = [index for index in args.samples if not 0 <= index < num_packs]
    if beyond:
        raise UsageError(
            f"--samples {beyond[0]}: the file becomes packs 0 to {num_packs - 1}",
            "settings that differ from the run's make different packs",
            "give --seq-length, --pack, --overlong, --overlong-conversations, --split, --append-eod and the "
            "flags of conversations as the run had them",
            code="out-of-range",
        )
    return args.samples


@returns_exit_code
def main(argv: Sequence[str] | None = None, name: str = "mkd inspect") -> None:
    args = build_parser(name).parse_args(argv)
    if (args.path is None) == (args.input is None):
        what = "no path of data is given" if args.path is None else "PATH and --input are both given"
        raise UsageError(what, "one of them is shown", f"write {name} PATH --student MODEL", code="add-flag")
    args.input = args.input or args.path
    for flag, path in {"--picture": args.picture, "--histogram": args.histogram}.items():
        require_new_file(flag, Path(path) if path else None, args.overwrite)
    from mkd.platform import prepare_for_files

    prepare_for_files()  # before mkd.data imports Megatron
    colour = args.color or (sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    by_record = args.align or args.prompts or args.context is not None
    show_alignment(args, colour) if by_record else show_packs(args, colour)
