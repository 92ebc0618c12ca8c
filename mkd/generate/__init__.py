"""A teacher writes the data: completions of prompts as records to train from (`mkd generate`).

In reading order:

    generate_settings.py   settings, and what they refuse
    teacher_prompts.py     the prompts as records, and in the teacher's tokens
    completions.py         a completion on disk
    teacher_records.py     from sampled ids to a record
    journal.py             completions on disk while the job runs, so that a kill loses none
    work_folder.py         the folder beside the output: settings, journals, summary
    judge.py               rewards, in a thread beside the sampler
    selection.py           the completions that are kept, and the counts of the others
    generate_job.py        what is missing, and the output at the end
    in_process_teacher.py  completions by the processes of the job
    served_teacher.py      completions by a vLLM server
    generate_texts.py      the job: check, sample, select, write
"""
