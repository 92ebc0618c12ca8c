"""Distillation of language models on Megatron-core.

A run begins in run/main.py, and its training step is train/step.py. Imports run one way, from the first of
these packages down to the last (pyproject.toml).

    commands/        the commands of `mkd`, a file each
    quickstart/      a real small model on a CPU, from nothing
    generate/        a teacher writes the data
    recipe/          from two models and text to a run
    chat/            texts by a student and its teacher, outside a run
    run/             the life of a run: planned, built, trained, ended
    pruning/         a student cut out of its teacher
    report/          one HTML file of several runs
    serving/         an export in a server
    evaluation/      held-out text and tasks
    kinds/           what a run may be: a folder for each feature that changes what it learns from
    resolve/         the run that files and flags describe
    train/           ONE STEP: schedule, teachers, loss, optimizer
    convert/         Hugging Face folders to Megatron checkpoints, and back
    release/         model card, hub, other formats
    operations/      signals, watchdog, crashes, folders
    models/          the decoders, and the stage that holds student and teachers
    data/            from files to micro-batches
    checkpoint/      Megatron's checkpoints, and Hugging Face's
    log/             metrics and their destinations
    xtoken/          alignment of two tokenizers, and losses over chunks
    losses/          divergences on vocabulary shards, fused heads, kernels
    tokenizers/      tokenizers behind one interface
    rounding/        the arithmetic of rounded weights
    parallel/        the process grid, and what processes send each other
    platform/        the machine: CUDA, or a CPU with gloo
    plan/            layout, time and memory of a run; without torch
    families/        the model families: config.json and tensors
    config/          settings, flags, YAML
    error_codes/     what each code of an error means
    errors.py        the errors that users see

Beside them:

    __main__.py, version.py      the command line, the version
    doctor.py, import_probe.py   the machine and its Python, for `mkd doctor`
    tested_versions.py           versions of packages that mkd is tested with
    lm_eval.py                   lm-evaluation-harness on mkd's own model
    torchrun_report.py           why a rank ended, for its launcher
    parent_process.py            processes that end with the one that started them
    busy_machine.py              one thread where other processes fill the cores
    progress_bars.py             no progress bars of transformers
    file_start.py                what the first bytes of a file say
    human.py, run_command.py     numbers and commands as people read them
"""
