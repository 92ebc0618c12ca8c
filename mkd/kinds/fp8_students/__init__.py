"""Students whose decoder layers multiply in FP8 while they are trained.

fp8_settings.py    the precision and its scales
fp8_students.py    the kind: checks, plan, loss card, identity

The layers are in mkd/models/fp8_layers.py.
"""
