"""The models of a plan: their shapes, parameters, floating-point operations and processes.

model_shape.py       the shape of a model, from its config.json
other_folders.py     what a folder holds that is no model
parameters.py        parameters of models and processes
lora_shape.py        adapters of a student
flops.py             floating-point operations of models
towers.py            vision towers: parameters, time and memory
mixer_kernels.py     the kernels of mixers on GPUs
stored_experts.py    experts that a checkpoint stores as codes, and a teacher may keep so
placement.py         the decoder layers of a teacher: their place and precision
rounded_tensors.py   the matrices that a rounded student may round
planned_models.py    student and teachers with their layouts
planned_teachers.py  the teachers of a run with their settings, and the student beside them
"""
