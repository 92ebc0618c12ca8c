"""Names that other trainers give to settings of mkd, for the hint of an unknown flag or key.

They are hints, not aliases: one name for one thing. Names of Megatron-LM are in megatron_flags.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

_NAMES = {  # ours -> names in transformers, TRL, NeMo, torchtitan, Axolotl, LLaMA-Factory, lighteval
    "lr": "learning-rate max-lr peak-lr optim-lr optimizer-lr",
    "min-lr": "lr-min min-learning-rate learning-rate-end",
    "lr-decay-style": "lr-scheduler-type lr-scheduler scheduler schedule",
    "lr-warmup-iters": "warmup-steps warmup num-warmup-steps lr-warmup-steps warmup-iters",
    "lr-decay-iters": "lr-decay-steps decay-steps",
    "weight-decay": "wd",
    "clip-grad": "max-grad-norm gradient-clipping grad-clip gradient-clip-val clip-grad-norm max-norm",
    "adam-beta1": "beta1",
    "adam-beta2": "beta2",
    "adam-eps": "adam-epsilon eps epsilon",
    "train-iters": "max-steps num-steps steps total-steps train-steps num-train-steps iters max-iters "
    "iterations",
    "micro-batch-size": "per-device-train-batch-size train-batch-size per-gpu-batch-size "
    "device-batch-size mbs",
    "global-batch-size": "total-batch-size effective-batch-size gbs",
    "seq-length": "max-length max-seq-length max-seq-len seq-len sequence-length sequence-len context-length "
    "max-position block-size cutoff-len",
    "bf16": "dtype torch-dtype precision mixed-precision model-dtype",
    "seed": "random-seed",
    "eval-interval": "eval-steps eval-every evaluation-strategy eval-strategy val-interval",
    "eval-iters": "eval-batches max-eval-batches",
    "recompute-granularity": "gradient-checkpointing activation-checkpointing grad-checkpointing",
    "student-hf": "model model-name-or-path model-name model-path pretrained-model student student-model "
    "student-model-name-or-path student-name base-model",
    "teacher-hf": "teacher teacher-model teacher-model-name-or-path teacher-name teacher-path ref-model",
    "kd-ratio": "alpha kd-alpha kd-loss-alpha distillation-weight kd-weight",
    "kd-temperature": "temperature temp kd-temp distillation-temperature logit-kl-temperature",
    "kd-divergence": "loss loss-type kd-loss divergence kl-type",
    "kd-jsd-beta": "jsd-beta",
    "dpo-beta": "dpo-temperature",
    "data-path": "data dataset dataset-name train-file train-data train-dataset datasets dataset-path "
    "training-data data-dir input",
    "valid-data-path": "valid-data validation-data eval-data eval-file validation-file valid-file "
    "eval-dataset validation-dataset val-data",
    "tokenizer-model": "tokenizer tokenizer-name tokenizer-path tokenizer-name-or-path",
    "num-workers": "dataloader-num-workers workers",
    "save": "output-dir out-dir out output checkpoint-dir save-dir save-path ckpt-dir checkpoint-path",
    "load": "resume resume-from-checkpoint resume-from load-dir load-path",
    "save-interval": "save-steps save-every checkpoint-interval checkpointing-steps",
    "keep-checkpoints": "save-total-limit max-checkpoints",
    "export-hf": "hf-out export export-dir hf-output-dir",
    "log-interval": "logging-steps log-every log-steps print-freq",
    "log-dir": "logging-dir logdir log-path",
    "name": "run-name exp-name experiment-name",
    "wandb-project": "wandb report-to project wandb-name",
    "tensorboard-dir": "tensorboard tb-dir",
    "mlflow-experiment": "mlflow mlflow-experiment-name",
    "trackio-project": "trackio trackio-name",
    "tensor-model-parallel-size": "tp tp-size tensor-parallel tensor-parallel-size tensor-parallel-degree",
    "pipeline-model-parallel-size": "pp pp-size pipeline-parallel pipeline-parallel-size "
    "pipeline-parallel-degree",
    "context-parallel-size": "cp cp-size context-parallel context-parallel-degree",
    "expert-model-parallel-size": "ep ep-size expert-parallel expert-parallel-size expert-parallel-degree",
    "max-new-tokens": "max-completion-length max-tokens max-generation-length",
    "samples-per-prompt": "num-generations n-samples num-samples-per-prompt group-size",
    "on-policy-fraction": "on-policy student-data-fraction lmbda",
    "pack": "packing packing-strategy",
    "split": "val-split validation-split eval-split train-split",
    "reward": "reward-fn reward-funcs reward-model",
    "xtoken-loss": "uld-loss use-uld-loss cross-tokenizer",
}
OURS = {other: ours for ours, others in _NAMES.items() for other in others.split()}

_TEXTS = {  # what no flag of mkd sets
    "--train-iters: a run counts optimizer steps, not epochs. `mkd plan` shows the tokens of a step": (
        "epochs num-epochs num-train-epochs max-epochs n-epochs"
    ),
    "--global-batch-size: micro-batches are accumulated until a step has so many packs": (
        "gradient-accumulation-steps grad-accum accumulate-grad-batches grad-accumulation-steps "
        "gradient-accumulation"
    ),
    "mkd train --nproc-per-node N, one process for each GPU; several machines need torchrun": (
        "gpus num-gpus n-gpus devices num-processes nproc-per-node nproc_per_node num-nodes nnodes device"
    ),
    "--lr-warmup-iters: warm-up is given in steps": "warmup-ratio lr-warmup-ratio",
    "--no-bf16, which is the default": "fp32",
    "--xtoken-loss partition_kl, the default: it compares chunks of several tokens exactly too": (
        "xtoken-exact-token-match-only exact-token-match-only"
    ),
    "one record for each document; --pack bfd, the default, fills packs with short ones": (
        "characters-per-sample"
    ),
    "--kd-jsd-beta for the jsd divergence, or --dpo-beta for preferences": "beta",
    "--use-distributed-optimizer, and parallelism by --tensor-model-parallel-size and others": (
        "deepspeed fsdp zero zero-stage fsdp-config"
    ),
}
HINTS = {other: text for text, others in _TEXTS.items() for other in others.split()}


def hint(name: str, known: Collection[str], prefix: str = "--") -> str:
    """Return what to do about an unknown `name`, written with dashes or underscores as `known` names are.

    A name that another trainer, or another command of mkd, uses comes before a similar spelling; "" if there
    is neither.
    """
    plain = name.removeprefix(prefix).replace("_", "-")
    if plain in HINTS:
        return f"use {HINTS[plain]}"
    ours = prefix + OURS[plain].replace("-", "-" if prefix else "_") if plain in OURS else None
    same = [prefix + one for one in _NAMES.get(plain, "").split() if prefix + one in known]
    nearest = [ours] if ours in known else same or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {nearest[0]}?" if nearest else ""
