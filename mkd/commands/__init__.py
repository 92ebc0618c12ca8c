"""The commands of `mkd`, a file each: a parser of flags and `main(argv)`, which returns the exit code.

mkd/__main__.py has the table of commands. Libraries that take seconds are imported after the flags are
parsed, so that `--help` is quick. tools/ has a script of a few lines for most of them, for checkouts.

    quickstart.py    a small real model on a CPU, from nothing to a student
    init.py          the settings of a first run, chosen and written with their reasons
    distill.py       all of it in one go
    train.py         training; the run itself is in mkd/run
    plan.py          time and memory of a run, without torch
    doctor.py        the machine and its Python environment
    explain.py       errors by their codes
    make_student.py  a smaller student, cut out of a model
    preprocess.py    text to a tokenised corpus
    inspect.py       packs, and aligned chunks, as models see them
    data.py          the same, and every record read before a run: `mkd data preview`, `mkd data check`
    evaluate.py      held-out tasks
    chat.py          a conversation with a student and its teacher
    sample.py        completions of prompts by both
    generate.py      a teacher's completions as data
    report.py        one HTML file of runs, or a picture of their curves
    compare.py       the metrics of two runs
    compare_models.py two models on one text, of the same command
    convert.py       Hugging Face to Megatron
    export.py        Megatron to Hugging Face
    parity.py        mkd against transformers
    serve_check.py   an export in vLLM against mkd
    projection.py    vocabularies of two tokenizers
    topk.py          a teacher's stored predictions
    hidden.py        a teacher's stored hidden states
    cache_flags.py   what these two share
    chat_flags.py    flags of commands that read conversations as training does
    text_flags.py    what `chat`, `sample` and `generate` share
    completion.py    commands and flags for the Tab key of a shell
    launch_scripts.py    the scripts of launch/, copied out of an installed mkd
    one_process.py   the error of a command that torchrun must not start
"""
