"""Reports of a run.

In reading order:

    metrics        the registry of metrics, and their averages over a log interval
    progress       the lines that a person reads
    writers        metrics.jsonl and TensorBoard behind one logger
    wandb_writer   Weights & Biases
    records        reading metrics.jsonl back
"""
