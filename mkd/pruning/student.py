"""Make a student: from a request to the written folder and the table of candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mkd.checkpoint.hf.hf_reader import HFCheckpoint, check_hf_checkpoint, resolve_hf
from mkd.data.batch import PackedBatch
from mkd.errors import UsageError
from mkd.parallel.context import ParallelContext
from mkd.plan.model_shape import ModelShape
from mkd.platform import detect
from mkd.pruning.cut import Cut, evenly_spaced, without_middle
from mkd.pruning.depth import DepthCandidate, best, measure, measure_blocks, measure_one_by_one
from mkd.pruning.measured_text import read_batches
from mkd.pruning.probe import Probe, Score
from mkd.pruning.sizes import WIDTH_FLAGS, Sizes, StudentSizes, num_parameters
from mkd.pruning.student_files import require_width_rules, write_student
from mkd.pruning.width import choose_width
from mkd.tokenizers.load import load_tokenizer

BATCH_TOKENS = 512  # measured at once: two sets of fp32 logits of 150,000 rows are 0.6 GiB
SEARCHES = {"block": measure_blocks, "one-by-one": measure_one_by_one}


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


@dataclass(frozen=True)
class StudentReport:
    """The written student, and what was measured on the way."""

    cut: Cut
    shape: ModelShape
    candidates: tuple[DepthCandidate, ...] = ()  # () unless layers were chosen by measurement
    score: Score | None = None  # of the written student; None without text


def make_student(
    request: StudentRequest, say: Callable[[str], None] = print, context: ParallelContext | None = None
) -> StudentReport:
    """Choose the cut, write the student, and score it. `say` gets the lines for people.

    `context` is one process; by default, one is joined and left if there is text. Raises UsageError for sizes
    that the teacher does not have or that need text, CheckpointError for a teacher that is damaged, and
    DataError for the text.
    """
    folder = resolve_hf(request.teacher)
    teacher = ModelShape.from_hf_dir(folder)
    sizes = request.sizes.resolve(teacher)
    own = StudentSizes.of(teacher)
    narrower = [flag for name, flag in WIDTH_FLAGS.items() if getattr(sizes, name) < getattr(own, name)]
    check_request(request, folder, sizes, teacher, narrower)
    say(f"teacher  {describe(teacher)}")
    layers = without_middle(teacher.num_layers, sizes.num_layers)
    if request.method == "even":
        layers = evenly_spaced(teacher.num_layers, sizes.num_layers)
    if not request.text:
        say(f"no text: the layers are chosen by position ({request.method})")
        cut = Cut(layers)
        return StudentReport(cut, _write(folder, request.out, cut, say))
    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(folder))
    lengths = dict(num_tokens=request.num_tokens, seq_length=request.seq_length, batch_tokens=BATCH_TOKENS)
    batches = read_batches(request.text, tokenizer, **lengths)
    joined = context or ParallelContext.create(detect())
    try:
        return _measured(request, folder, sizes, Cut(layers), bool(narrower), batches, joined, say)
    finally:
        if context is None:
            joined.leave()


def check_request(
    request: StudentRequest, folder: Path, sizes: StudentSizes, teacher: ModelShape, narrower: Sequence[str]
) -> None:
    """Raise what is wrong with the request before a weight is read. `narrower` are flags that cut width."""
    if request.out.exists() and request.out.samefile(folder):
        raise UsageError(
            f"--out {request.out} is the teacher's folder",
            "the student would overwrite it",
            "choose another folder",
            code="student-overwrites-teacher",
        )
    needs = narrower or (["--method one-by-one"] if request.method == "one-by-one" else [])
    if needs and not request.text:
        raise UsageError(
            f"{', '.join(needs)} needs text",
            "the parts to keep are chosen by what the teacher computes on it",
            "give --data-path FILE",
            code="cut-needs-text",
        )
    check_hf_checkpoint(teacher, HFCheckpoint(folder))
    if narrower:
        require_width_rules(teacher)
    Cut(tuple(range(sizes.num_layers))).config(teacher)  # raises if config.json cannot describe such a cut


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
    sizes: StudentSizes,
    cut: Cut,  # the layers that stay if they are not chosen by measurement
    is_narrower: bool,
    batches: Sequence[PackedBatch],
    context: ParallelContext,
    say: Callable[[str], None],
) -> StudentReport:
    probe = Probe.load(folder, context)
    say(f"measuring on {sum(batch.num_loss_tokens for batch in batches):,} tokens")
    everything = tuple(range(len(probe.layers)))
    candidates = [DepthCandidate(cut.layers, tuple(sorted({*everything} - {*cut.layers})))]
    if request.method == "even" or len(cut.layers) == len(everything):
        measure(probe, batches, everything, candidates)
    else:
        candidates = SEARCHES[request.method](probe, batches, len(cut.layers))
    chosen = candidates[-1] if request.method == "one-by-one" else best(candidates)
    for line in table(candidates, chosen, probe.model.shape):
        say(line)
    cut, score = Cut(chosen.layers), chosen.score
    if is_narrower:
        cut = choose_width(probe, batches, cut, **{name: getattr(sizes, name) for name in WIDTH_FLAGS})
    shape = _write(folder, request.out, cut, say)
    if is_narrower:
        score = score_student(probe, Probe.load(request.out, context), batches)
    say(f"student  KL {score.kl:.4f}, top-1 agreement {score.top1:.4f}, cross entropy {score.ce:.4f}")
    return StudentReport(cut, shape, tuple(candidates), score)


def _write(folder: Path, out: Path, cut: Cut, say: Callable[[str], None]) -> ModelShape:
    shape = write_student(folder, out, cut)
    say(f"student  {describe(shape)}, in {out}\nkept     teacher layers {ranges(cut.layers)}")
    return shape


def score_student(teacher: Probe, student: Probe, batches: Sequence[PackedBatch]) -> Score:
    """Return the student's predictions against the teacher's."""
    score = Score()
    for batch in batches:
        rows = [probe.enter(batch) for probe in (teacher, student)]
        logits = [
            probe.logits(row, probe.run(row, range(len(probe.layers))))
            for probe, row in zip((teacher, student), rows, strict=True)
        ]
        teacher.add_score(score, rows[0], logits[1], logits[0])
    return score


def table(candidates: Sequence[DepthCandidate], chosen: DepthCandidate, teacher: ModelShape) -> list[str]:
    """Return the candidates as lines; a star marks the chosen one."""
    lines = ["removed layers    parameters       KL    top-1   tokens"]
    for one in candidates:
        score, parameters = one.score, num_parameters(Cut(one.layers).shape(teacher))
        star = "  *" if one is chosen else ""
        lines.append(
            f"{ranges(one.removed):14} {parameters:13,} {score.kl:8.4f} {score.top1:8.4f} "
            f"{score.num_tokens:8,}{star}"
        )
    return lines


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in short: `0-11, 18-29`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"
