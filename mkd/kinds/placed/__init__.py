"""Where a teacher's decoder layers are while they do not compute, and in which precision they do.

placed_settings.py  settings
choice.py           a value of such a setting as a class, and what all values have in common
place.py            the base of all places, and the device
host_place.py       layers in host memory
student_place.py    the weights of a student that learns by adapters
peer_place.py       layers that several processes split
precision.py        the base of all precisions, and that of the run
fp8.py              products in FP8
fp8_experts.py      the same of experts
stored_codes.py     experts whose weights stay as their checkpoint stores them
known_places.py     all places and all precisions, as two kinds of runs

To add a place, write its class in a file, name it in placed_settings.py and list it in known_places.py.
"""
