"""The plan of a run: batch, layouts, memory and time, from a configuration and the models' shapes.

It starts without torch. In reading order:

    model_shape.py       the shape of a model, from its config.json
    batch.py             global batch, micro-batches and data parallelism
    layout.py            the pipeline layout of one model
    expert_parallel.py   expert parallelism of each model
    planned_models.py    student and teachers with their layouts
    sampling_memory.py   the memory of keys and values while the student samples
    work.py              what features add to times and memory
    planned_teachers.py  the teachers of a run with their settings, and the student beside them
    peer_groups.py       which processes split a teacher
    hardware.py          the machine that plans assume
    flops.py             floating-point operations of models
    parameters.py        parameters of models and processes
    collectives.py       the collectives of tensor, context and expert parallelism
    layer_time.py        the time of a micro-batch in each layer of a model
    towers.py            vision towers: parameters, time and memory
    cost.py              the time of a micro-batch on each pipeline stage
    auto_layout.py       the pipeline layouts of all models, balanced
    facts.py             what follows from configuration and shapes, resolved once and read by all below
    bubble.py            the time that ranks wait in a step
    prefetch.py          teacher forwards ahead of the student
    prefetch_replay.py   the replay of such a plan, message by message
    activations.py       the memory of a micro-batch
    head.py              rows of a block of the fused head
    memory.py            the peak memory of every pipeline rank
    update_time.py       the time of the optimizer's update
    checks/              validation: every problem of a configuration
    forecast.py          all of the above for one run
    forecast_text.py     its text
    teacher_place.py     where the teachers' weights can be, and the place to choose
    verdict.py           whether the run fits its GPUs, and what to change if not
    notes.py             settings without effect, teachers ahead that cost time, a CPU that is the limit
"""
