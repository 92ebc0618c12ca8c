"""Destinations of metrics beside metrics.jsonl: one file each, registered by name in `known_loggers`.

In reading order:

    logger              what a logger is, and what all of them share
    known_loggers       the registry; errors for those whose package is missing; their start
    guarded             a logger that fails in a run costs one warning, never the run
    tensorboard_logger  event files
    wandb_logger        Weights & Biases
    mlflow_logger       MLflow
    trackio_logger      trackio
"""
