"""Settings of training: length, batch, precision and memory, and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import option


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch, precision and memory of a run."""

    train_iters: int = option(
        0, "optimizer steps of the whole run, including those before a resume; required"
    )
    micro_batch_size: int = option(
        1, "packs that run through the models together. Raise it while memory allows"
    )
    global_batch_size: int | None = option(
        None, "packs of one optimizer step (default: one micro-batch on every data-parallel rank)"
    )
    seq_length: int = option(
        2048, "tokens of a pack, which may hold several documents. Batch sizes count packs"
    )
    bf16: bool = option(False, "run the models in bfloat16 with fp32 master weights; without it, in fp32")
    seed: int = option(1234, "seed of the data order and of random generators")
    eval_interval: int | None = option(
        None,
        "optimizer steps between evaluations, besides those before the first step and after the last one. "
        "0 means never (default: only these two, if --valid-data-path or --split hold data out)",
    )
    eval_iters: int = option(
        10,
        "global batches of one evaluation, at most. 0 means never evaluate. Fewer than Megatron's "
        "100 suffice, because packs of held-out text are full",
    )
    exit_interval: int | None = option(
        None, "save and stop when the iteration is a multiple of this number (default: never)"
    )
    exit_duration_in_mins: float | None = option(
        None,
        "minutes within which the run stops and saves. Set it below the time limit of a queue (default: no "
        "limit)",
    )
    exit_signal_handler: bool = option(
        True,
        "finish the step, save and exit with code 75 on SIGTERM, SIGUSR1 or Ctrl-C. A second Ctrl-C stops at "
        "once, with code 130. Without the handler they kill the run",
    )
    recompute_granularity: str | None = option(
        None,
        "activations of the student to recompute in backward, which saves memory: those of whole layers "
        "(full) or of --recompute-modules only (selective) (default: none)",
        choices=("full", "selective"),
    )
    recompute_method: str | None = option(
        None,
        "grouping of full recomputation: uniform units of layers, or the first layers of every pipeline "
        "stage (block)",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = option(
        None,
        "layers of a uniform unit, or layers that block recomputes in every pipeline stage, with full "
        "recomputation",
    )
    recompute_modules: tuple[str, ...] = option(
        ("core_attn",),
        "parts of a layer that selective recomputation recomputes: core_attn (attention), moe (experts "
        "with their router), mixer (a gated delta net or Mamba-2 between its projections)",
    )
    moe_aux_loss_coeff: float = option(
        0.0,
        "weight of the loss that balances the load of the student's experts within every document. "
        "0 means none: the teacher is the target",
    )
    moe_z_loss_coeff: float = option(
        0.0, "weight of the loss that keeps the logits of the student's routers small. 0 means none"
    )
    moe_router_bias_update_rate: float = option(
        0.0,
        "step by which every update moves e_score_correction_bias of the student towards an even load of its "
        "experts (DeepSeek-V3, Moonlight; 0.001 in DeepSeek-V3's pre-training). 0 leaves it as it is",
    )
    optimizer_residency: str = option(
        "device",
        "place of the optimizer state between updates: device, or host (pinned memory). "
        "host takes less device memory and is slower",
        choices=("device", "host"),
    )
    cuda_graphs: str = option(
        "auto",
        "start the kernels of all decoder layers together, as CUDA graphs, so that GPUs do not wait for the "
        "CPU. auto: where that is possible (the plan says which models). off: never",
        choices=("auto", "off"),
    )
    deterministic_mode: bool = option(
        False, "use only kernels that give the same bits in every run. Slower on GPUs"
    )
    non_finite: str = option(
        "abort",
        "reaction to a NaN or infinite loss or gradient on any process. abort: end the run with exit code "
        "70. skip: leave out the update of that step. Both leave the parameters unchanged and name models "
        "and samples",
        choices=("abort", "skip"),
    )
    max_non_finite_skips: int = option(10, "consecutive skipped updates after which one more ends the run")

    @property
    def evaluates(self) -> bool:
        """True if the run evaluates held-out data or tasks. Megatron's --eval-iters 0 switches both off."""
        return bool(self.eval_interval and self.eval_iters)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = option(1e-4, "peak learning rate. 1e-4 suits a pruned student, 1e-5 a finished model")
    min_lr: float = option(0.0, "learning rate at the end of decay, and its lower bound")
    lr_decay_style: str = option(
        "cosine",
        "shape of the learning rate after warm-up",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = option(None, "iteration at which decay ends (default: --train-iters)")
    lr_warmup_iters: int = option(0, "first iterations, in which the learning rate rises linearly from 0")
    lr_wsd_decay_style: str = option(
        "exponential",
        "shape of the last phase of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = option(None, "iterations of the last phase of WSD; required with it")
    weight_decay: float = option(0.01, "decoupled weight decay. Norms and biases have none")
    clip_grad: float = option(
        1.0, "global gradient norm above which gradients are scaled down. 0 means never"
    )
    adam_beta1: float = option(0.9, "decay of Adam's first moment")
    adam_beta2: float = option(
        0.999, "decay of Adam's second moment. 0.95 to 0.99 reacts faster in short runs"
    )
    adam_eps: float = option(1e-8, "term added to the denominator of Adam's step")
