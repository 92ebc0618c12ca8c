"""The plan of a run: batch, layouts, memory and time, from a configuration and the models' shapes.

It starts without torch. In reading order:

    models/          shapes, parameters and floating-point operations of the models
    parallel_sizes.py  processes along each axis of parallelism
    batch.py         global batch, micro-batches and data parallelism
    layout.py        the pipeline layout of one model
    auto_layout.py   the pipeline layouts of all models, balanced
    work.py          what kinds of runs add to times and memory
    facts.py         what follows from configuration and shapes, resolved once and read by all below
    times/           the time of a step
    footprint/       its memory
    checks/          validation: every problem of a configuration
    sides.py         the processes of the student, and of teachers that have their own
    serving_side.py  time and memory of such a teacher
    forecast.py      all of the above for one run
    teacher_split.py  the search for processes of a teacher's own
    advice/          forecasts, verdicts and advice as text
"""
