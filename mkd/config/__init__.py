"""Settings of a run, without torch. In reading order:

schema           all settings of a run, a dataclass per section
models           student, teachers, and the extra settings of a cross-tokenizer teacher
run_files        data, checkpoints, reports
options          the schema as a flat list of options
flags            the command line
yaml_file        the YAML file
load             both together, with the origin of every value
megatron_flags   flags of Megatron-LM that mkd does not have
"""
