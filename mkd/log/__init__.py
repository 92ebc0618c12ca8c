"""Reports of a run.

In reading order:

    metrics.py     the registry of metrics, and their averages over a log interval
    compact.py     the short lines that a person reads
    progress.py    the long lines of Megatron-LM, and the choice between both
    loggers/       TensorBoard, W&B, MLflow and trackio: one file each
    writers.py     metrics.jsonl, and the loggers beside it
    records.py     reading metrics.jsonl back
"""
