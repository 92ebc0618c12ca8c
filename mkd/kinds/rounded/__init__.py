"""Students whose weights are rounded to few bits after every update (quantisation-aware distillation).

rounding_settings.py   the format, its groups, and what keeps its precision
rounded_student.py     the kind: loss card, identity
rounding_checks.py     what cannot be rounded, or not in this layout

The formats are in mkd/config/rounding_formats.py, their arithmetic in mkd/rounding/, and the matrices of a
student in mkd/checkpoint/hf/hf_rounded.py.
"""
