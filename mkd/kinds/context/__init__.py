"""Teachers that read another prompt than the student: instructions, documents, a solution.

context_settings.py   the settings of such a teacher
made_fields.py        fields that a step of sampling fills
contexts.py           the kind of teacher: checks and loss card
context_setup.py      its side of the text
context_term.py       the term of the loss

The records are read by mkd/data/aligned/context_records.py.
"""
