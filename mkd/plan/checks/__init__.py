"""Validation: every problem of a configuration at once, before anything runs.

problems.py      all checks in one list; find_problems runs them
ranges.py        the range of every number
training.py      length, learning-rate schedule, recomputation
locations.py     data, held-out data and tasks, folders of checkpoints, W&B and profiles
teachers.py      student and teachers, and settings of the loss
prefetch_limits.py  teacher forwards ahead of the student
parallel.py      parallel layout, batch, packs, and the models' shapes
vision_limits.py models with images: parts that learn, layers that take features
expert_limits.py expert parallelism and settings of experts
model_alone.py   problems of a model that runs alone, without training
no_effect.py     the problem of a setting that nothing reads
"""
