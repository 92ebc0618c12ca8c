"""Teachers whose weights are a moving average of the student's.

ema_settings.py      the settings of the average
averaged_teachers.py the kind of run: checks, notes and the text of the loss card

mkd/train/moving_average.py moves the average, and mkd/checkpoint/averages.py saves it.
"""
