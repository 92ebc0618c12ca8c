"""The kinds of runs: each feature that changes what a run learns from has a folder.

kind.py          the hooks of a kind; each adds nothing by default
known_kinds.py   all kinds, and their additions together
loss_card.py     the objective of a run as text
sampled/         the student's own text: completions of prompts, sampled here or by a server
lora/            students that learn by adapters
routed/          records whose tags choose their teachers
weighted/        records that count more or less than others
stored/          teachers whose predictions were exported before
cross_tokenizer/ teachers with another tokenizer
context/         teachers that read another prompt than the student
averaged/        teachers whose weights average the student's
texts.py         the record of the text of a run
placed/          places and precisions of teachers' layers
apart/           teachers on processes of their own
fp8_students/    students that multiply in FP8 while they are trained
fp8_limits.py    limits of products in FP8, for teachers and students
rounded/         students whose weights are rounded to few bits
judged/          losses of judged answers: preference pairs, and rewards of sampled answers

Modules that `mkd/config` imports hold settings and formulas alone. A plan asks the kinds without torch: only
`Kind.device_problems`, `Kind.data_term` and the hooks from `Kind.teacher_setup` on load it.
"""
