"""Reports of a run.

In reading order:

    metrics        the registry of metrics, and their averages over a log interval
    compact        the short lines that a person reads
    progress       the long lines of Megatron-LM, and the choice between both
    loggers        TensorBoard, W&B, MLflow and trackio: one file each
    writers        metrics.jsonl, and the loggers beside it
    records        reading metrics.jsonl back
"""
