"""Flags of Megatron-LM's training scripts that mkd does not have, or does not have yet.

If a command line or YAML file names one, the error says what to do instead. No flag is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from mkd.errors import UsageError


def _by_flag(flags: Mapping[str, str]) -> dict[str, str]:
    """Return --flag -> text for text -> flags."""
    return {f"--{flag}": text for text, names in flags.items() for flag in names.split()}


USE_INSTEAD = _by_flag(
    {
        "--student-hf and --teacher-hf: both models' config.json say it": (
            "num-layers num-experts hidden-size ffn-hidden-size num-attention-heads num-query-groups "
            "group-query-attention kv-channels max-position-embeddings position-embedding-type rotary-base "
            "rotary-percent use-rope-scaling rope-scaling-factor use-rotary-position-embeddings "
            "rotary-seq-len-interpolation-factor no-position-embedding normalization norm-epsilon "
            "apply-layernorm-1p qk-layernorm swiglu squared-relu disable-bias-linear add-bias-linear "
            "add-qkv-bias untie-embeddings-and-output-weights vocab-size window-size init-method-std "
            "openai-gelu encoder-num-layers decoder-num-layers encoder-seq-length decoder-seq-length spec"
        ),
        "--train-iters and the other counts of iterations: a run counts optimizer steps": (
            "train-samples lr-decay-samples lr-warmup-samples"
        ),
        "--student-load instead of --load: weights alone, with a new optimizer": (
            "finetune no-load-optim no-load-rng pretrained-checkpoint"
        ),
        "--tokenizer-model with the tokenizer's folder": "vocab-file merge-file tiktoken-pattern",
        "--data-path and --valid-data-path": (
            "train-data-path test-data-path data-args-path per-split-data-args-path"
        ),
        "--teacher-load or --teacher-hf": "export-kd-teacher-load",
        "--kd-ratio, --kd-temperature and --kd-divergence": "export-kd-cfg",
        "--student-pipeline-layout and --teacher-pipeline-layout": "pipeline-model-parallel-layout",
        "--student-pipeline-layout": (
            "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers "
            "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split"
        ),
        "--num-virtual-stages-per-pipeline-rank": "virtual-pipeline-model-parallel-size",
        "--tensor-model-parallel-size": "model-parallel-size",
        "--micro-batch-size": "batch-size",
        "--bf16": "fp16 fp4-format",
        "--student-precision fp8 and --teacher-precision fp8; parameters stay in bf16": (
            "fp8-format fp8-recipe fp8-param-gather"
        ),
        "--bf16, which needs no loss scale": "loss-scale initial-loss-scale min-loss-scale",
        "one --global-batch-size for the whole run": "rampup-batch-size",
        "AdamW, by leaving the flag away": "optimizer",
        "--weight-decay": "start-weight-decay end-weight-decay weight-decay-incr-style",
        "--lr-warmup-iters: warm-up starts at 0": "lr-warmup-init",
        "--lr-warmup-iters: warm-up is given in steps": "lr-warmup-fraction",
        "--recompute-granularity selective": "recompute-activations",
        "--recompute-granularity full": "checkpoint-activations",
        "--no-shuffle, or nothing for random order": "dataloader-type",
        "--no-append-eod, or nothing: the end-of-text token is learnt": "eod-mask-loss",
        "--load: mkd always restores what the checkpoint holds": (
            "use-checkpoint-args use-checkpoint-opt_param-scheduler"
        ),
        "--save-interval": "non-persistent-save-interval",
        "mkd convert": "load-model-format ckpt-convert-format",
        "--name": "wandb-exp-name",
        "--log-dir": "wandb-save-dir",
        "--log-dir: snapshots are in its folder profile/": "memory-snapshot-path",
        "--profile-steps FIRST LAST: both are profiled": "profile-step-start profile-step-end",
        "--ckpt-step: a named iteration must exist": "exit-on-missing-checkpoint",
    }
)
"""Flag -> replacement."""

SAFE_TO_DROP = _by_flag(
    {
        "mkd picks Megatron-core layers and the fastest attention that is installed": (
            "use-mcore-models use-legacy-models transformer-impl use-flash-attn attention-backend"
        ),
        "mkd decides by device which operations are fused": (
            "no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion "
            "no-rope-fusion no-persist-layer-norm no-gradient-accumulation-fusion cross-entropy-loss-fusion "
            "cross-entropy-fusion-impl disable-tp-comm-split-ag tp-comm-overlap enable-cuda-graph"
        ),
        "LM heads and loss are always computed together": "kd-fused-head no-kd-fused-head",
        "distillation runs without dropout, as both models expect": "attention-dropout hidden-dropout",
        "documents of a pack never see each other, and their positions restart": (
            "reset-position-ids reset-attention-mask no-create-attention-mask-in-dataloader "
            "create-attention-mask-in-dataloader variable-seq-lengths use-packed-sequence"
        ),
        "mkd averages over tokens, reduces in fp32 and checks for NaN, always": (
            "calculate-per-token-loss accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16 "
            "check-for-nan-in-loss-and-grad no-check-for-nan-in-loss-and-grad attention-softmax-in-fp32 "
            "apply-query-key-layer-scaling no-query-key-layer-scaling"
        ),
        "checkpoints are torch_dist folders that hold the whole state and load at any layout; the flags of a "
        "run win": (
            "use-dist-ckpt dist-ckpt-format ckpt-format auto-detect-ckpt-format ckpt-fully-parallel-save "
            "no-ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure "
            "dist-ckpt-strictness no-save-optim no-save-rng override-opt_param-scheduler"
        ),
        "mkd chooses it from the device and the parallel layout": (
            "distributed-backend local-rank lazy-mpu-init use-cpu-initialization "
            "no-async-tensor-model-parallel-allreduce no-overlap-p2p-communication overlap-p2p-communication "
            "no-align-grad-reduce ddp-bucket-size ddp-average-in-collective empty-unused-memory-level "
            "defer-embedding-wgrad-compute overlap-p2p-communication-warmup-flush manual-gc "
            "manual-gc-interval"
        ),
        "mkd pads the vocabulary and opens data by itself": (
            "make-vocab-size-divisible-by tokenizer-hf-use-fast mmap-bin-files no-mmap-bin-files data-impl "
            "num-dataset-builder-threads"
        ),
        "--profile writes a torch.profiler trace, except under nsys": "use-pytorch-profiler",
        "mkd always writes its own figures to metrics.jsonl and the progress line": (
            "log-throughput log-params-norm log-num-zeros-in-grad log-progress log-timers-to-tensorboard "
            "log-validation-ppl-to-tensorboard log-memory-to-tensorboard tensorboard-log-interval "
            "tensorboard-queue-size timing-log-level timing-log-option no-log-learning-rate-to-tensorboard "
            "log-world-size-to-tensorboard no-log-loss-scale-to-tensorboard logging-level no-one-logger"
        ),
    }
)
"""Flag -> reason why nothing is lost without it."""

NOT_YET = _by_flag(
    {
        "use --use-distributed-optimizer": "use-torch-fsdp2 use-megatron-fsdp optimizer-cpu-offload",
        "use models without multi-token prediction": "mtp-num-layers",
        "use models without latent attention": "multi-latent-attention",
    }
)
"""Flag -> alternative until mkd supports it."""


def unsupported(flag: str, label: str) -> UsageError | None:
    """Return the error of a flag that mkd knows but lacks, or None. `label` is the flag or its place."""
    if flag in USE_INSTEAD:
        return UsageError(f"{label}: known, not supported: use {USE_INSTEAD[flag]}", code="flag-replaced")
    if flag in SAFE_TO_DROP:
        what = f"{label}: known, not supported: safe to drop"
        return UsageError(what, SAFE_TO_DROP[flag], "remove it", code="remove-flag")
    if flag in NOT_YET:
        return UsageError(
            f"{label}: not supported yet", "this release does not have it", NOT_YET[flag], code="flag-not-yet"
        )
    return None
