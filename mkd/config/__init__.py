"""The settings of a run: one schema behind the command line and the YAML file. Starts without torch.

schema.py            the sections of a configuration, with the help of every flag and key
models.py            the sections of student and teachers
split.py             the format of the setting split
options.py           the schema as a flat list of options; reading values from text
megatron_flags.py    flags of Megatron-LM that mkd does not have
flags.py             the command line
yaml_file.py         the YAML file
load.py              command line and file together, with the origin of every value
"""
