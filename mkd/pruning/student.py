"""Make a student: from a request to the written folder and the tables of candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mkd.checkpoint.hf.hf_check import check_hf_checkpoint
from mkd.checkpoint.hf.hf_folder import model_in_the_way
from mkd.checkpoint.hf.hf_reader import HFCheckpoint, resolve_hf
from mkd.data.batch import PackedBatch
from mkd.errors import MkdError, UsageError, collect_error
from mkd.operations.disk import Written, disk_problems
from mkd.parallel.context import ParallelContext
from mkd.plan.model_shape import ModelShape
from mkd.platform import detect
from mkd.pruning.cut import Cut, evenly_spaced, first_parts, without_middle
from mkd.pruning.measured_text import TimedBatches, read_batches
from mkd.pruning.probe import Probe, Score
from mkd.pruning.search import Option, depth_table, measure_option, option_table, ranges, score_student
from mkd.pruning.sizes import WIDTH_FLAGS, Sizes, StudentSizes, num_parameters
from mkd.pruning.student_files import require_loadable, require_width_rules, write_student
from mkd.tokenizers.load import load_tokenizer

BATCH_TOKENS = 512  # measured at once: two sets of fp32 logits of 150,000 rows are 0.6 GiB


@dataclass(frozen=True)
class StudentRequest:
    """Everything that `make_student` is asked for."""

    teacher: str  # Hugging Face folder or hub id
    out: Path
    sizes: Sizes
    method: str = "block"  # how layers are chosen: block, one-by-one or even
    text: tuple[str, ...] = ()  # files of records; (): nothing is measured
    num_tokens: int = 8192
    seq_length: int = 256
    overwrite: bool = False  # the model in `out` may be replaced


@dataclass(frozen=True)
class StudentReport:
    """The written student, and what was measured on the way."""

    cut: Cut
    shape: ModelShape
    options: tuple[Option, ...] = ()  # () without text
    score: Score | None = None  # of the written student; None without text


def make_student(
    request: StudentRequest, say: Callable[[str], None] = print, context: ParallelContext | None = None
) -> StudentReport:
    """Choose the cut, write the student, and score it. `say` gets the lines for people.

    `context` is one process; by default, one is joined and left if there is text. Raises UsageError for sizes
    that the teacher does not have or that need text, or if `out` holds a model, CheckpointError for a teacher
    that is damaged, and DataError for the text.
    """
    require_room(request)
    folder = resolve_hf(request.teacher)
    teacher = ModelShape.from_hf_dir(folder)
    refuse_images(teacher)
    alternatives = possible_sizes(request, teacher)
    check_request(request, folder, teacher)
    say(f"teacher  {describe(teacher)}")
    if not request.text:
        say(f"no text: the layers are chosen by position ({request.method})")
        choose = evenly_spaced if request.method == "even" else without_middle
        cut = Cut(choose(teacher.num_layers, alternatives[0].num_layers))
        return StudentReport(cut, _write(folder, request.out, cut, say))
    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(folder))
    lengths = dict(num_tokens=request.num_tokens, seq_length=request.seq_length, batch_tokens=BATCH_TOKENS)
    batches = read_batches(request.text, tokenizer, **lengths)
    joined = context or ParallelContext.create(detect())
    try:
        return _measured(request, folder, alternatives, TimedBatches(batches, say), joined, say)
    finally:
        if context is None:
            joined.leave()


def require_room(request: StudentRequest) -> None:
    """Raise UsageError if the student would replace a model, before a teacher is downloaded."""
    out, teacher = request.out, Path(request.teacher)
    if out.exists() and teacher.exists() and out.samefile(teacher):
        raise UsageError(
            f"--out {out} is the teacher's folder",
            "the student would overwrite it",
            "choose another folder",
            code="student-overwrites-teacher",
        )
    in_the_way = None if request.overwrite else model_in_the_way("--out", out)
    if in_the_way is not None:
        raise in_the_way


def possible_sizes(request: StudentRequest, teacher: ModelShape) -> list[StudentSizes]:
    """Return the sizes that reach the request and that can be measured and written, at least one.

    Raises UsageError if there are none: the problem of the first.
    """
    problems: list[MkdError] = []
    alternatives = request.sizes.resolve(teacher)
    possible = [
        sizes
        for sizes in alternatives
        if collect_error(problems, partial(_check_sizes, request, sizes, teacher))
    ]
    if not possible:
        raise problems[0]
    return possible


def _check_sizes(request: StudentRequest, sizes: StudentSizes, teacher: ModelShape) -> bool:
    """Return True if a cut to `sizes` can be chosen and written; raise UsageError if not."""
    own = StudentSizes.of(teacher)
    names = [name for name in WIDTH_FLAGS if getattr(sizes, name) < getattr(own, name)]
    if names and not request.text:
        given = [WIDTH_FLAGS[name] for name in names if getattr(request.sizes, name) is not None]
        raise _needs_text(", ".join(given or ["--target-params, which cuts FFN channels here,"]))
    if request.method == "one-by-one" and not request.text:
        raise _needs_text("--method one-by-one")
    if names:
        require_width_rules(teacher)
    require_loadable(first_parts(sizes, teacher).config(teacher))
    return True


def _needs_text(subject: str) -> UsageError:
    return UsageError(
        f"{subject} needs text",
        "the parts to keep are chosen by what the teacher computes on it",
        "give --data-path FILE",
        code="cut-needs-text",
    )


def refuse_images(teacher: ModelShape) -> None:
    """Raise `UsageError` for a model with images."""
    if teacher.vision is not None:
        raise UsageError(
            f"mkd cannot cut a {teacher.vision.family} model",
            "its vision tower makes features as wide as the text model, and a cut knows only the text model",
            "cut its text model saved on its own",
            code="images-cut-not-supported",
        )


def check_request(request: StudentRequest, folder: Path, teacher: ModelShape) -> None:
    """Raise what is wrong with the folders, or with the family, before a weight is read."""
    if teacher.moe is not None:
        raise UsageError(
            f"mkd cannot cut a {teacher.family} model with experts",
            "which layers have experts is counted by position, and a cut would move them",
            "cut a dense model",
            code="experts-cut-not-supported",
        )
    blocked = disk_problems([Written("the student", "--out", request.out)])
    if blocked:
        raise blocked[0]
    check_hf_checkpoint(teacher, HFCheckpoint(folder))


def describe(shape: ModelShape) -> str:
    """Return one line: parameters and sizes."""
    return (
        f"{num_parameters(shape):,} parameters: {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"FFN {shape.layers[0].ffn_hidden_size}, {shape.num_query_groups} attention groups of "
        f"{shape.heads_per_group} heads"
    )


def _measured(
    request: StudentRequest,
    folder: Path,
    alternatives: Sequence[StudentSizes],
    batches: Sequence[PackedBatch],
    context: ParallelContext,
    say: Callable[[str], None],
) -> StudentReport:
    probe = Probe.load(folder, context)
    say(f"measuring on {sum(batch.num_loss_tokens for batch in batches):,} tokens")
    options = []
    for sizes in alternatives:
        options.append(measure_option(probe, batches, sizes, request.method))
        if len(options[-1].candidates) > 1 or len(alternatives) == 1:
            say("\n".join(depth_table(options[-1], probe.model.shape)))
    chosen = min(options, key=lambda option: option.score.kl)
    if len(options) > 1:
        say("\n".join(option_table(options, chosen, probe.model.shape)))
    shape, score = _write(folder, request.out, chosen.cut, say), chosen.score
    if chosen.cut.hidden:
        score = score_student(probe, Probe.load(request.out, context), batches)
    say(f"student  KL {score.kl:.4f}, top-1 agreement {score.top1:.4f}, cross entropy {score.ce:.4f}")
    return StudentReport(chosen.cut, shape, tuple(options), score)


def _write(folder: Path, out: Path, cut: Cut, say: Callable[[str], None]) -> ModelShape:
    shape = write_student(folder, out, cut)
    say(f"student  {describe(shape)}, in {out}\nkept     teacher layers {ranges(cut.layers)}")
    return shape
