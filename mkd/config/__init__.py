"""Settings of a run, without torch.

In reading order:

    field.py             a documented field, which becomes a flag and a YAML key
    schema.py            all settings of a run: its sections, and the objective
    layout_settings.py   how processes share models and batch
    training_settings.py training and its optimizer
    models.py            student, teachers, and the extra settings of a cross-tokenizer teacher
    divergence.py        the divergences: names, parameters, formulas
    rounding_formats.py  the formats that a student's weights may be rounded to
    run_files.py         data, checkpoints, reports
    data_files.py        paths of the data flags: blends, and suffixes of files of records
    not_paths.py         texts that are given as paths and are none
    tag_rules.py         which teachers teach the records of which tag
    split.py             the format of the setting `split`
    prompt_template.py   texts with fields that records fill
    options.py           the schema as a flat list of options; reading values from text
    megatron_flags.py    flags of Megatron-LM that mkd does not have
    student_base.py      a teacher that is the student as it starts
    self_teacher.py      the shorthand for it
    other_names.py       names that other trainers give to settings of mkd
    flags.py             the command line
    yaml_file.py         the YAML file
    packaged.py          example configurations and launch scripts that come with mkd
    load.py              both together, with the origin of every value
"""
