"""Make a student: from a request to the written folder and the tables of candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mkd.checkpoint.hf.hf_check import check_hf_checkpoint
from mkd.checkpoint.hf.hf_hub import resolve_hf
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.data.batch import PackedBatch
from mkd.data.measured_text import TimedBatches, read_batches
from mkd.errors import MkdError, collect_error
from mkd.human import counted
from mkd.parallel.context import ParallelContext
from mkd.plan.models.model_shape import ModelShape
from mkd.platform import detect
from mkd.pruning.cut import Cut, evenly_spaced, first_parts, without_middle
from mkd.pruning.probe import Probe, Score
from mkd.pruning.request import StudentRequest, check_request, narrower, text_problem
from mkd.pruning.search import Option, depth_table, measure_option, option_table, ranges, score_student
from mkd.pruning.sizes import StudentSizes, num_parameters
from mkd.pruning.student_files import require_loadable, require_width_rules, write_student
from mkd.tokenizers.load import load_tokenizer

BATCH_TOKENS = 512  # measured at once: two sets of fp32 logits of 150,000 rows are 0.6 GiB


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

    `context` is one process; by default, one is joined and left if there is text. Raises the errors of
    `check_request`, UsageError for sizes that the family cannot have, CheckpointError for a teacher that is
    damaged, and DataError for the text.
    """
    teacher = check_request(request)
    alternatives = possible_sizes(request, teacher)
    folder = resolve_hf(request.teacher)
    check_hf_checkpoint(teacher, HFCheckpoint(folder))
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
    problem = text_problem(request, sizes, teacher)
    if problem is not None:
        raise problem
    if narrower(sizes, teacher):
        require_width_rules(teacher)
    require_loadable(first_parts(sizes, teacher).config(teacher))
    return True


def describe(shape: ModelShape) -> str:
    """Return one line: parameters and sizes."""
    return (
        f"{num_parameters(shape):,} parameters: {counted(shape.num_layers, 'layer')}, "
        f"hidden {shape.hidden_size}, FFN {shape.layers[0].ffn_hidden_size}, "
        f"{counted(shape.num_query_groups, 'attention group')} of "
        f"{counted(shape.heads_per_group, 'head')}"
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
