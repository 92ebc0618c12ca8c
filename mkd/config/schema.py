"""The schema of a run: one dataclass per section. Each field has the help text of its flag and YAML key.

`Config()` holds the defaults. A field is a flag of the same name (`--seq-length`) and a YAML key
(`seq_length`). Fields of the student, the first teacher and its cross-tokenizer settings carry their
section's name (`--student-hf`, `--xtoken-loss`). A help text starts with a verb or a noun. Where the default
is None, it ends with what applies then: `(default: ...)`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields, replace

from mkd.config.divergence import KDDivergence
from mkd.config.field import option
from mkd.config.models import LIVE, TEACHER_COMBINATIONS, StudentConfig, TeacherConfig, XTokenConfig
from mkd.config.run_files import CheckpointConfig, DataConfig, LogConfig
from mkd.config.self_teacher import SelfTeacherSettings
from mkd.config.split import parse_split
from mkd.errors import UsageError
from mkd.kinds.judged.pair_losses.dpo import DPO
from mkd.kinds.judged.pair_losses.pair_loss import PairLoss
from mkd.kinds.judged.pair_losses.simpo import SimPO
from mkd.kinds.judged.reward_settings import RewardConfig
from mkd.kinds.lora.lora_settings import LoRAConfig
from mkd.kinds.rounded.rounding_settings import RoundingConfig
from mkd.kinds.routed.route_settings import RouteSettings
from mkd.kinds.sampled.rollout_settings import RolloutConfig
from mkd.kinds.weighted.weight_settings import WeightConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "KDConfig",
    "LogConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "StudentConfig",
    "TeacherConfig",
    "TrainingConfig",
    "XTokenConfig",
]


@dataclass(frozen=True)
class ParallelConfig:
    """Layout of both models over processes. Data parallel = processes / (tensor x pipeline x context)."""

    tensor_model_parallel_size: int = option(
        1,
        "processes that share every layer. Raise it when a layer or the logits do not fit one device; "
        "stay inside one machine",
    )
    pipeline_model_parallel_size: int = option(
        1,
        "processes that hold consecutive pipeline stages of both models. "
        "Raise it when the models do not fit otherwise",
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None,
        "student layers of a virtual pipeline stage, for interleaving; the teacher gets as many stages. "
        "It shrinks the pipeline bubble and sends more messages (default: no interleaving)",
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        "virtual stages of each pipeline rank, for interleaving. Alternative to "
        "--num-layers-per-virtual-pipeline-stage (default: no interleaving)",
    )
    pipeline_layout: str = option(
        "even",
        "rule that splits layers over pipeline stages without an explicit layout. even: the same number "
        "everywhere. auto: both models together, so that the slowest pipeline rank, heads included, is as "
        "fast as possible",
        choices=("even", "auto"),
    )
    context_parallel_size: int = option(
        1,
        "processes that share every sequence. Raise it when long sequences do not fit one device. "
        "Documents are padded to a multiple of twice this size",
    )
    expert_model_parallel_size: int = option(
        1,
        "processes that share the experts of every layer; it divides tensor x context x data parallel. "
        "Raise it when the student's experts do not fit one device",
    )
    expert_tensor_parallel_size: int = option(
        1, "processes that share every expert. Must be 1: experts are spread whole"
    )
    sequence_parallel: bool = option(
        False,
        "split norms and residuals over the tensor-parallel processes too: less memory, same result. "
        "No effect at tensor-parallel size 1",
    )
    use_distributed_optimizer: bool = option(
        False, "shard the optimizer state over data-parallel processes. Saves memory when there are several"
    )
    overlap_grad_reduce: bool = option(
        False, "reduce gradients over data-parallel processes during backward. Faster on GPUs"
    )
    overlap_param_gather: bool = option(
        False,
        "gather updated parameters during the next forward. Needs --use-distributed-optimizer and "
        "--overlap-grad-reduce",
    )
    teacher_prefetch: str = option(
        "auto",
        "micro-batches that teacher forwards may run ahead of the loss. Teachers then work while the "
        "student's pipeline waits, and need memory for that many hidden states. auto: twice the pipeline "
        "ranks if forwards can run ahead and their memory fits, else 0. 0 means never. A number needs "
        "pipeline parallelism without interleaving, a teacher that runs, and no rollouts",
    )
    distributed_timeout_minutes: float = option(
        10.0,
        "minutes without progress after which a process ends the run and reports where every rank stands. "
        "Raise it for slow file systems and large data",
    )
    distributed_timeout_seconds_after_init: float | None = option(
        None,
        "timeout in seconds after the first step, saves excluded (default: --distributed-timeout-minutes)",
    )


@dataclass(frozen=True)
class KDConfig(RouteSettings, KDDivergence):
    """The objective: (1 - kd_ratio) x cross entropy + kd_ratio x divergence from the teacher."""

    kd_ratio: float = option(
        0.5,
        "weight of distillation in the loss, 0 to 1. 0 is plain training and never loads the teacher, whose "
        "settings have no effect; training at 1 computes no cross entropy",
    )
    kd_temperature: float = option(
        1.0,
        "divisor of both models' logits before the divergence. Above 1 the teacher's small probabilities "
        "count more",
    )
    kd_temperature_scaling: str = option(
        "squared",
        "factor on the divergence: squared (temperature squared, which keeps the gradient's size) or none",
        choices=("squared", "none"),
    )
    teacher_combination: str = option(
        "weighted_sum",
        "way to combine several teachers. weighted_sum: sum of their divergences, weights normalised to 1. "
        "average: one divergence from the weighted mean of their probabilities (student's tokenizer only). "
        "select: for each pack the teacher with the lowest cross entropy of the same text. route: for each "
        "record the teachers of its tag, and no other teacher runs",
        choices=TEACHER_COMBINATIONS,
    )
    teacher_weighting: str = option(
        "static",
        "source of a weighted_sum's weights. static: the configuration. Otherwise each pack has "
        "softmax(ln(weight) - score) over the teachers. The score, a mean over student tokens, is the "
        "teacher's cross entropy (ce), its entropy, or 1 - its highest probability (confidence)",
        choices=("static", "ce", "entropy", "confidence"),
    )
    teacher_weighting_temperature: float = option(
        1.0, "divisor of the scores of --teacher-weighting. Below 1 the best teacher gets more of the weight"
    )
    kd_fp32_logits: bool = option(
        False,
        "compute the training loss's logits in fp32 under --bf16. Rounding errors of the gradient are ten "
        "times smaller. A block of logits takes twice the memory, the loss about a tenth more time. "
        "Evaluation always has fp32 logits",
    )

    @property
    def averages_teachers(self) -> bool:
        """True if one divergence compares the student with the mean of all teachers."""
        return self.teacher_combination == "average"

    @property
    def selects_teacher(self) -> bool:
        """True if each pack has the loss of its best teacher alone."""
        return self.teacher_combination == "select"

    @property
    def weighs_packs(self) -> bool:
        """True if the weights of several teachers differ from pack to pack."""
        return self.selects_teacher or self.teacher_weighting != "static"


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


@dataclass(frozen=True)
class Config(SelfTeacherSettings):
    """All settings of a run."""

    student: StudentConfig = StudentConfig()
    teachers: tuple[TeacherConfig, ...] = ()
    parallel: ParallelConfig = ParallelConfig()
    kd: KDConfig = KDConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    dpo: DPO = DPO()
    simpo: SimPO = SimPO()
    grpo: RewardConfig = RewardConfig()
    weighted: WeightConfig = WeightConfig()
    lora: LoRAConfig = LoRAConfig()
    rounding: RoundingConfig = RoundingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    device_memory_gib: float | None = option(
        None,
        "memory of one GPU in GiB (an 80 GB one has 79.1, an H200 139.8). The plan then says whether the "
        "run fits, and what to change if not (default: not checked)",
    )
    dry_run: bool = option(
        False,
        "check flags, models, tokenizers, layout, disk and the first records of the data; print the plan; "
        "load nothing. Only a run itself reads all of the data and compares its settings with those of "
        "--load",
    )

    @property
    def needs_models(self) -> bool:
        """True if the loss compares the student with other models."""
        return self.kd.kd_ratio > 0 or (self.pair_loss is not None and self.pair_loss.needs_reference)

    @property
    def why_no_models(self) -> str:
        """The cause of `needs_models` being False."""
        return "--kd-ratio is 0" if self.pair_loss is None else f"{self.pair_loss.title} has no reference"

    @property
    def pair_losses(self) -> tuple[PairLoss, ...]:
        """Losses of preference pairs that are on: one in a run without problems, or none."""
        sections = (getattr(self, one.name) for one in fields(self))
        return tuple(one for one in sections if isinstance(one, PairLoss) and one.beta is not None)

    @property
    def pair_loss(self) -> PairLoss | None:
        """Loss of preference pairs; None if the run has none."""
        return next(iter(self.pair_losses), None)

    def with_evaluation(self) -> Config:
        """Return the configuration; if it holds data out without an interval, with one as long as the run."""
        training, valid = self.training, bool(self.data.valid_data_path)
        with suppress(UsageError):  # reported by the checks
            valid = valid or parse_split(self.data.split).validation > 0
        if not valid or training.eval_interval is not None or not training.train_iters:
            return self
        return replace(self, training=replace(training, eval_interval=training.train_iters))

    def with_reference(self) -> Config:
        """Return the configuration; if it needs a reference and has none, with the initial student.

        A single teacher that names no model says where this reference is, and in which precision.
        """
        initial = self.student.hf or self.student.load
        pair_loss = self.pair_loss
        needs_reference = pair_loss.needs_reference if pair_loss else self.grpo.is_on and self.needs_models
        given = self.teachers or (TeacherConfig(),)
        is_named = len(given) > 1 or given[0].is_given or given[0].weights == LIVE
        if is_named or not (needs_reference and initial):
            return self
        return replace(self, teachers=(replace(given[0], hf=self.student.hf, load=self.student.load),))


PAIR_LOSSES = tuple(type(one.default) for one in fields(Config) if isinstance(one.default, PairLoss))
"""Classes of all losses of preference pairs."""
