"""Length, batch, steps and learning rate of a first run, from its text and its models."""

from __future__ import annotations

import math
import os

from mkd.human import counted, duration, number
from mkd.plan.models.parameters import active_parameters, model_parameters
from mkd.recipe.first_request import Request, have_other_tokens
from mkd.recipe.settings import Settings
from mkd.recipe.survey import Survey

LENGTHS = {True: (1024, 2048, 8192), False: (128, 256, 256)}
"""Is there a GPU -> tokens of the shortest pack, of the usual one, of the longest."""
UPDATES = 1000  # that one pass over the text is to have
MOST_BATCH_TOKENS = {True: 2**20, False: 4096}
LEAST_BATCH_TOKENS = {True: 2**14, False: 512}
FEW_STEPS, MOST_PASSES = 100, 3
CPU_FLOPS = 20e9  # of a core, measured with the quickstart (docs/quickstart.md): 22e9
CPU_SECONDS = 3600.0  # most that a first run on a CPU may take
EVALUATIONS, EVALUATED_BATCHES = {True: 10, False: 4}, {True: 10, False: 4}
"""Is there a GPU -> evaluations of held-out text after the first, and batches of each."""


def choose_basics(request: Request, settings: Settings, text: Survey, most: int | None = None) -> None:
    """Choose everything that does not depend on the layout. `most`: longest pack that may fit."""
    _choose_models(request, settings)
    settings.put(
        "kd.kd_ratio",
        0.9,
        "0.9 x KL to the teacher + 0.1 x cross entropy: close to the teacher, and the text still counts "
        '(README, "Does distillation pay?")',
    )
    settings.put("data.data_path", request.data, text.describe())
    _choose_length(request, settings, text, most)
    if request.gpus:
        settings.put("training.bf16", True, "half the memory and several times the speed of fp32 on GPUs")
    _choose_held_out(request, settings, text)
    _choose_learning_rate(request, settings)
    settings.put("checkpoint.save", str(request.out / "run"), "also metrics and settings")
    settings.put(
        "checkpoint.load", settings.get("checkpoint.save"), "the same folder: the same command resumes"
    )
    settings.put("checkpoint.keep_checkpoints", 2, "the newest two")
    settings.put("checkpoint.export_hf", str(request.out / "hf"), "the trained student, for transformers")
    settings.put("log.name", request.out.name)


def _choose_models(request: Request, settings: Settings) -> None:
    student, teacher = request.student_shape, request.teacher_shape
    sizes = [f"{number(model_parameters(one).total)} parameters" for one in (student, teacher)]
    cut = "to be cut out of the teacher by `mkd make-student`, " if request.sizes is not None else ""
    settings.put("student.hf", request.student_folder, f"{cut}{sizes[0]}")
    settings.put("teachers[0].hf", request.teacher, sizes[1])
    if request.sizes is None and have_other_tokens(request.teacher, request.student):
        settings.put(
            "teachers[0].xtoken.loss",
            "partition_kl",
            "the two models have other tokens: they are compared on aligned text (docs/cross-tokenizer.md)",
        )


def _choose_length(request: Request, settings: Settings, text: Survey, fits: int | None) -> None:
    least, usual, most = LENGTHS[request.gpus > 0]
    limit = min(one.max_position_embeddings for one in (request.student_shape, request.teacher_shape))
    wanted = 2 ** math.ceil(math.log2(max(text.long_document, 2)))
    length = max(least, min(max(wanted, usual), most))
    length = min(length, limit)
    why = "tokens of a pack, which holds several documents"
    if length == limit:
        why += "; the models read no more"
    elif length > usual:
        why += "; 95 % of the documents fit whole"
    elif wanted > length:
        why += "; longer ones are split, because more takes too long on a CPU"
    if fits is not None and fits < length:
        length, why = fits, f"{length} does not fit the memory of the GPUs; longer documents are split"
    settings.put("training.seq_length", length, why)


def choose_batch(request: Request, settings: Settings, text: Survey) -> None:
    """Choose the batch and the steps."""
    length, has_gpu = settings.get("training.seq_length"), request.gpus > 0
    wanted = max(LEAST_BATCH_TOKENS[has_gpu], min(text.tokens / UPDATES, MOST_BATCH_TOKENS[has_gpu]))
    unit = request.processes  # and several of them, for larger micro-batches
    unit *= next(packs for packs in (8, 4, 2, 1) if wanted >= packs * unit * length or packs == 1)
    packs = unit * max(1, round(wanted / length / unit))
    tokens = packs * length
    packs = settings.put(
        "training.global_batch_size",
        packs,
        f"packs of a step, {tokens:,} tokens: one pass over the text has about "
        f"{counted(math.ceil(text.tokens / tokens), 'step')}",
    )
    one_pass = max(1, round(text.tokens / (packs * length)))
    passes = min(MOST_PASSES, math.ceil(FEW_STEPS / one_pass))
    steps = one_pass * passes
    why = "one pass over the text" if passes == 1 else f"{passes} passes over the text, which is short"
    if not has_gpu:
        seconds = cpu_seconds(request, packs * length)
        possible = max(10, int(CPU_SECONDS / seconds))
        if possible < steps:
            why = f"of {counted(steps, 'step')} for {why}, as many as take about an hour on this CPU"
            steps = possible
        why += f"; predicted {duration(steps * seconds)}"
    steps = settings.put("training.train_iters", steps, why)
    settings.put(
        "training.eval_interval",
        math.ceil(steps / num_evaluations(steps, settings.get("training.eval_iters"), has_gpu)),
        "held-out text, also before the first step",  # rounded up: the last two are not side by side
    )
    # A step of warm-up has rate 0: too much of a run of a few steps.
    settings.put("optimizer.lr_warmup_iters", min(100, steps // 20), "a twentieth of the run, 100 at most")


def num_evaluations(steps: int, batches: int, has_gpu: bool) -> int:
    """Return how often a run evaluates after its first step.

    A batch of an evaluation takes about half a step, and all of them take a quarter of the run at most.
    """
    return max(1, min(EVALUATIONS[has_gpu], steps // max(2 * batches, 1)))


def cpu_seconds(request: Request, tokens: int) -> float:
    """Return the estimated time of a step on this machine's CPU."""
    student, teacher = active_parameters(request.student_shape), active_parameters(request.teacher_shape)
    return tokens * (6 * student + 2 * teacher) / (CPU_FLOPS * len(os.sched_getaffinity(0)))


def _choose_held_out(request: Request, settings: Settings, text: Survey) -> None:
    if "data.valid_data_path" not in settings.given:
        held_out = 1 if text.documents >= 2000 else 5
        settings.put(
            "data.split", f"{100 - held_out},{held_out},0", f"{held_out} % of the documents are held out"
        )
    batches = EVALUATED_BATCHES[request.gpus > 0]
    settings.put("training.eval_iters", batches, "batches of an evaluation, at most")


def _choose_learning_rate(request: Request, settings: Settings) -> None:
    rate = 1e-4 if request.is_cut else 1e-5
    kind = "a cut of the teacher has to repair what is missing"
    if not request.is_cut:
        kind = "a finished model must not forget; a base model bears 1e-4"
    rate = settings.put("optimizer.lr", rate, kind)
    settings.put("optimizer.min_lr", float(f"{rate / 10:.3g}"), "a tenth, at the end of the cosine")
