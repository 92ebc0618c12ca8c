"""Destinations of metrics beside metrics.jsonl: one file each, registered by name in `known_loggers`.

In reading order:

    logger.py              what a logger is, and what all of them share
    known_loggers.py       the registry; errors for those whose package is missing; their start
    guarded.py             a logger that fails in a run costs one warning, never the run
    tensorboard_logger.py  event files
    wandb_logger.py        Weights & Biases
    mlflow_logger.py       MLflow
    trackio_logger.py      trackio
"""
