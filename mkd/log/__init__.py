"""The reports of a run.

metrics.py                      every metric, its unit, and how steps are averaged to one line
progress.py                     the lines for people, in Megatron's style
writers.py, wandb_writer.py     metrics.jsonl, TensorBoard and W&B
records.py                      metrics.jsonl read back
"""
