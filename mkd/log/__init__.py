"""Reports of a run.

In reading order:

    metrics        the registry of metrics, and their averages over a log interval
    compact        the short lines that a person reads
    progress       the long lines of Megatron-LM, and the choice between both
    writers        metrics.jsonl and TensorBoard behind one logger
    wandb_writer   Weights & Biases
    records        reading metrics.jsonl back
"""
