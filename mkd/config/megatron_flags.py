"""Flags of Megatron-LM's training scripts that mkd does not have, or does not have yet.

If a command line or YAML file names one, the error says what to do instead. No flag is silently ignored.
"""

from __future__ import annotations

from mkd.errors import UsageError

_CONFIG_JSON = "--student-hf and --teacher-hf: both models' config.json say it"
_ITERATIONS = "--train-iters and the other counts of iterations: a run counts optimizer steps"
_CHECKPOINTS = "--load: mkd always restores what the checkpoint holds"
_CONVERT = "mkd convert"

USE_INSTEAD: dict[str, str] = {
    **dict.fromkeys(
        (
            "--num-layers",
            "--hidden-size",
            "--ffn-hidden-size",
            "--num-attention-heads",
            "--num-query-groups",
            "--group-query-attention",
            "--kv-channels",
            "--max-position-embeddings",
            "--position-embedding-type",
            "--rotary-base",
            "--rotary-percent",
            "--use-rope-scaling",
            "--rope-scaling-factor",
            "--use-rotary-position-embeddings",
            "--rotary-seq-len-interpolation-factor",
            "--no-position-embedding",
            "--normalization",
            "--norm-epsilon",
            "--apply-layernorm-1p",
            "--qk-layernorm",
            "--swiglu",
            "--squared-relu",
            "--disable-bias-linear",
            "--add-bias-linear",
            "--add-qkv-bias",
            "--untie-embeddings-and-output-weights",
            "--vocab-size",
            "--window-size",
            "--init-method-std",
            "--openai-gelu",
            "--encoder-num-layers",
            "--decoder-num-layers",
            "--encoder-seq-length",
            "--decoder-seq-length",
            "--spec",
        ),
        _CONFIG_JSON,
    ),
    **dict.fromkeys(("--train-samples", "--lr-decay-samples", "--lr-warmup-samples"), _ITERATIONS),
    **dict.fromkeys(
        ("--finetune", "--no-load-optim", "--no-load-rng", "--pretrained-checkpoint"),
        "--student-load instead of --load: weights alone, with a new optimizer",
    ),
    **dict.fromkeys(
        ("--vocab-file", "--merge-file", "--tiktoken-pattern"),
        "--tokenizer-model with the tokenizer's folder",
    ),
    **dict.fromkeys(
        ("--train-data-path", "--test-data-path", "--data-args-path", "--per-split-data-args-path"),
        "--data-path and --valid-data-path",
    ),
    "--export-kd-teacher-load": "--teacher-load or --teacher-hf",
    "--export-kd-cfg": "--kd-ratio, --kd-temperature and --kd-divergence",
    "--pipeline-model-parallel-layout": "--student-pipeline-layout and --teacher-pipeline-layout",
    "--decoder-first-pipeline-num-layers": "--student-pipeline-layout",
    "--decoder-last-pipeline-num-layers": "--student-pipeline-layout",
    "--account-for-embedding-in-pipeline-split": "--student-pipeline-layout",
    "--account-for-loss-in-pipeline-split": "--student-pipeline-layout",
    "--virtual-pipeline-model-parallel-size": "--num-virtual-stages-per-pipeline-rank",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--batch-size": "--micro-batch-size",
    "--fp16": "--bf16",
    "--fp8-format": "--bf16",
    "--fp4-format": "--bf16",
    "--loss-scale": "--bf16, which needs no loss scale",
    "--initial-loss-scale": "--bf16, which needs no loss scale",
    "--min-loss-scale": "--bf16, which needs no loss scale",
    "--rampup-batch-size": "one --global-batch-size for the whole run",
    "--optimizer": "AdamW, by leaving the flag away",
    "--start-weight-decay": "--weight-decay",
    "--end-weight-decay": "--weight-decay",
    "--weight-decay-incr-style": "--weight-decay",
    "--lr-warmup-init": "--lr-warmup-iters: warm-up starts at 0",
    "--recompute-activations": "--recompute-granularity selective",
    "--checkpoint-activations": "--recompute-granularity full",
    "--dataloader-type": "--no-shuffle, or nothing for random order",
    "--eod-mask-loss": "--no-append-eod, or nothing: the end-of-text token is learnt",
    "--use-checkpoint-args": _CHECKPOINTS,
    "--use-checkpoint-opt_param-scheduler": _CHECKPOINTS,
    "--non-persistent-save-interval": "--save-interval",
    "--load-model-format": _CONVERT,
    "--ckpt-convert-format": _CONVERT,
    "--wandb-exp-name": "--name",
    "--wandb-save-dir": "--log-dir",
    "--memory-snapshot-path": "--log-dir: snapshots are in its folder profile/",
    "--exit-on-missing-checkpoint": "--ckpt-step: a named iteration must exist",
}
"""Flag -> replacement."""

SAFE_TO_DROP: dict[str, str] = {
    **dict.fromkeys(
        (
            "--use-mcore-models",
            "--use-legacy-models",
            "--transformer-impl",
            "--use-flash-attn",
            "--attention-backend",
        ),
        "mkd picks Megatron-core layers and the fastest attention that is installed",
    ),
    **dict.fromkeys(
        (
            "--no-masked-softmax-fusion",
            "--no-bias-gelu-fusion",
            "--no-bias-swiglu-fusion",
            "--no-bias-dropout-fusion",
            "--no-rope-fusion",
            "--no-persist-layer-norm",
            "--no-gradient-accumulation-fusion",
            "--cross-entropy-loss-fusion",
            "--cross-entropy-fusion-impl",
            "--disable-tp-comm-split-ag",
            "--tp-comm-overlap",
            "--enable-cuda-graph",
        ),
        "mkd decides by device which operations are fused",
    ),
    **dict.fromkeys(
        ("--kd-fused-head", "--no-kd-fused-head"), "LM heads and loss are always computed together"
    ),
    **dict.fromkeys(
        ("--attention-dropout", "--hidden-dropout"),
        "distillation runs without dropout, as both models expect",
    ),
    **dict.fromkeys(
        (
            "--reset-position-ids",
            "--reset-attention-mask",
            "--no-create-attention-mask-in-dataloader",
            "--create-attention-mask-in-dataloader",
            "--variable-seq-lengths",
            "--use-packed-sequence",
        ),
        "documents of a pack never see each other, and their positions restart",
    ),
    **dict.fromkeys(
        (
            "--calculate-per-token-loss",
            "--accumulate-allreduce-grads-in-fp32",
            "--grad-reduce-in-bf16",
            "--check-for-nan-in-loss-and-grad",
            "--no-check-for-nan-in-loss-and-grad",
            "--attention-softmax-in-fp32",
            "--apply-query-key-layer-scaling",
            "--no-query-key-layer-scaling",
        ),
        "mkd averages over tokens, reduces in fp32 and checks for NaN, always",
    ),
    **dict.fromkeys(
        (
            "--use-dist-ckpt",
            "--dist-ckpt-format",
            "--ckpt-format",
            "--auto-detect-ckpt-format",
            "--ckpt-fully-parallel-save",
            "--no-ckpt-fully-parallel-save",
            "--ckpt-fully-parallel-load",
            "--ckpt-assume-constant-structure",
            "--dist-ckpt-strictness",
            "--no-save-optim",
            "--no-save-rng",
            "--override-opt_param-scheduler",
        ),
        "checkpoints are torch_dist folders that hold the whole state and load at any layout; the flags of "
        "a run win",
    ),
    **dict.fromkeys(
        (
            "--distributed-backend",
            "--local-rank",
            "--lazy-mpu-init",
            "--use-cpu-initialization",
            "--no-async-tensor-model-parallel-allreduce",
            "--no-overlap-p2p-communication",
            "--overlap-p2p-communication",
            "--no-align-grad-reduce",
            "--ddp-bucket-size",
            "--ddp-average-in-collective",
            "--empty-unused-memory-level",
            "--defer-embedding-wgrad-compute",
            "--overlap-p2p-communication-warmup-flush",
            "--manual-gc",
            "--manual-gc-interval",
        ),
        "mkd chooses it from the device and the parallel layout",
    ),
    **dict.fromkeys(
        (
            "--make-vocab-size-divisible-by",
            "--tokenizer-hf-use-fast",
            "--mmap-bin-files",
            "--no-mmap-bin-files",
            "--data-impl",
            "--num-dataset-builder-threads",
        ),
        "mkd pads the vocabulary and opens data by itself",
    ),
    **dict.fromkeys(
        (
            "--log-throughput",
            "--log-params-norm",
            "--log-num-zeros-in-grad",
            "--log-progress",
            "--log-timers-to-tensorboard",
            "--log-validation-ppl-to-tensorboard",
            "--log-memory-to-tensorboard",
            "--tensorboard-log-interval",
            "--tensorboard-queue-size",
            "--timing-log-level",
            "--timing-log-option",
            "--no-log-learning-rate-to-tensorboard",
            "--log-world-size-to-tensorboard",
            "--no-log-loss-scale-to-tensorboard",
            "--logging-level",
            "--no-one-logger",
        ),
        "mkd always writes its own figures to metrics.jsonl and the progress line",
    ),
}
"""Flag -> reason why nothing is lost without it."""

NOT_YET: dict[str, str] = {
    "--num-experts": "use dense models",
    "--use-torch-fsdp2": "use --use-distributed-optimizer",
    "--use-megatron-fsdp": "use --use-distributed-optimizer",
    "--optimizer-cpu-offload": "use --use-distributed-optimizer",
    "--mtp-num-layers": "use models without multi-token prediction",
    "--multi-latent-attention": "use models without latent attention",
}
"""Flag -> alternative until mkd supports it."""


def unsupported(flag: str, label: str) -> UsageError | None:
    """Return the error for a flag that mkd knows but does not support, or None for other flags.

    The error starts with `label`: the flag, or a place in a file.
    """
    if flag in USE_INSTEAD:
        return UsageError(f"{label}: known, not supported: use {USE_INSTEAD[flag]}", code="flag-replaced")
    if flag in SAFE_TO_DROP:
        return UsageError(
            f"{label}: known, not supported: safe to drop",
            SAFE_TO_DROP[flag],
            "remove it",
            code="flag-not-needed",
        )
    if flag in NOT_YET:
        return UsageError(
            f"{label}: not supported yet", "this release does not have it", NOT_YET[flag], code="flag-not-yet"
        )
    return None
