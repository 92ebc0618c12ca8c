"""The life of a run.

Read in this order:

    main.py                   the command: configuration in, trained student out, exit code
    early_checks.py           problems that are found before torch is imported
    chosen_place.py           the place of a teacher that the settings leave open
    plan_run.py               models, data and layouts of a run, from files and flags alone
    plan_text.py              the plan and the objective as text
    stored/                   predictions of teachers, exported and read again
    start_text.py             what a run shows before its first step
    dry_run.py                the verdict at the end of a dry run
    setup.py                  from a plan to a run: who gets which part
    read_texts.py             data, prompts and tasks, and how each teacher reads them
    text_notes.py             text that comes twice, and text that is long for a model
    build_data.py             the data sets
    build_models.py           student and teachers with their weights
    build_engine.py           schedule, losses and optimizer around them
    fingerprints.py           what identifies a run, compared when it resumes
    checkpoints.py            the checkpoint that a run resumes from, and those that it saves
    loop.py                   steps, evaluations, checkpoints
    one_model.py              one model alone: planned, built, evaluated
    student_side.py           a launch with teachers on processes of their own: watched, met and ended
    serve_teacher.py          the life of such a teacher's process
    exports.py                the student as Hugging Face folders, at the end
    end_text.py               where everything is at the end of a run, and the next commands
"""
