"""The schema of a run: one dataclass per section. Every field's help text here is the help of its flag and YAML key.

`Config()` holds the defaults. A field is a flag of the same name (`--seq-length`) and a YAML key (`seq_length`); the fields
of student, first teacher and its cross-tokenizer settings carry their section's name (`--student-hf`, `--xtoken-loss`).
"""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.models import DIVERGENCES, RESIDENCIES, StudentConfig, TeacherConfig, XTokenConfig, option

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "KDConfig",
    "LogConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "StudentConfig",
    "TeacherConfig",
    "TrainingConfig",
    "XTokenConfig",
]


@dataclass(frozen=True)
class ParallelConfig:
    """How both models are spread over processes. Data parallel = processes / (tensor x pipeline x context)."""

    tensor_model_parallel_size: int = option(
        1,
        "processes that share every layer; raise it when a layer or the logits do "
        "not fit one device, and stay inside one machine",
    )
    pipeline_model_parallel_size: int = option(
        1,
        "consecutive groups of layers on different processes; raise it when the models do not fit otherwise",
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None,
        "interleaving, by the student's layers per virtual stage; the teacher gets as many stages. "
        "It shrinks the pipeline bubble for more messages",
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None, "interleaving, by virtual stages of each pipeline rank; the other way to ask for the same"
    )
    pipeline_layout: str = option(
        "even",
        "how layers are split over pipeline stages without an explicit layout: even (the same number everywhere), or auto "
        "(both models together, so that the slowest pipeline rank, heads included, is as fast as possible)",
        choices=("even", "auto"),
    )
    context_parallel_size: int = option(
        1,
        "processes that share every sequence; raise it when long sequences do not fit one device. Documents are padded to "
        "a multiple of twice this size",
    )
    expert_model_parallel_size: int = option(
        1, "processes that share the experts; 1 in this release (dense models)"
    )
    sequence_parallel: bool = option(
        False,
        "also split norms and residuals over the tensor-parallel processes: less "
        "memory, same result; no effect at tensor parallel size 1",
    )
    use_distributed_optimizer: bool = option(
        False, "spread the optimizer state over data-parallel processes: less memory when there are several"
    )
    overlap_grad_reduce: bool = option(
        False, "reduce gradients over data parallel during backward; faster on GPUs"
    )
    overlap_param_gather: bool = option(
        False,
        "gather updated parameters during the next forward; needs "
        "--use-distributed-optimizer and --overlap-grad-reduce",
    )
    distributed_timeout_minutes: float = option(
        10.0,
        "minutes without progress after which a process ends the run, and says where each one stands; raise it for slow file "
        "systems and large data",
    )
    distributed_timeout_seconds_after_init: float | None = option(
        None, "the same in seconds, from the end of the first step on and not for saves; not given: as before"
    )


@dataclass(frozen=True)
class KDConfig:
    """The objective: (1 - kd_ratio) x cross entropy + kd_ratio x divergence from the teacher."""

    kd_ratio: float = option(
        0.5,
        "share of distillation in the loss, 0 to 1; 0 is plain training and never loads the "
        "teacher, 1 never computes the cross entropy",
    )
    kd_temperature: float = option(
        1.0,
        "both models' logits are divided by it before the divergence; above 1 the "
        "teacher's small probabilities count more",
    )
    kd_temperature_scaling: str = option(
        "squared",
        "factor on the divergence: temperature squared, which keeps its gradient's size, or none",
        choices=("squared", "none"),
    )
    kd_divergence: str = option(
        "forward_kl",
        "what is minimised: forward_kl is KL(teacher || student), which covers all that the teacher says; reverse_kl is "
        "KL(student || teacher), which keeps to what it says most; mixed_kl and jsd lie between",
        choices=DIVERGENCES,
    )
    kd_jsd_beta: float = option(
        0.5,
        "teacher's weight in the mixture that jsd compares both models with, 0 to 1; 0 and 1 mean forward_kl and reverse_kl",
    )
    kd_mixed_kl_weight: float = option(
        0.5, "weight of the forward KL in mixed_kl, 0 to 1; the reverse KL has the rest"
    )
    teacher_combination: str = option(
        "weighted_sum",
        "what several teachers make together: weighted_sum (of their divergences, each teacher's weight divided by the sum of "
        "all), average (one divergence from the mean of their probabilities, weighted likewise; student's tokenizer only), or "
        "select (for each pack the teacher with the lowest cross entropy of the same text)",
        choices=("weighted_sum", "average", "select"),
    )
    teacher_weighting: str = option(
        "static",
        "where the weights of a weighted_sum come from: static (the configuration), or for each pack the softmax of ln(weight) "
        "- what the teacher says of it: its cross entropy (ce), its entropy, or 1 - its highest probability (confidence), per "
        "student token",
        choices=("static", "ce", "entropy", "confidence"),
    )
    teacher_weighting_temperature: float = option(
        1.0, "divides what each teacher says of a pack; below 1 the best teacher gets more of the weight"
    )
    kd_fused_head: bool = option(
        True,
        "compute LM heads and loss together, chunk by chunk; without it all logits of a micro-batch exist at once",
    )
    kd_fp32_logits: bool = option(
        False,
        "make the training loss's logits in fp32 under --bf16: ten times smaller rounding errors in the gradient, for twice "
        "the memory of a chunk of logits and about a tenth more time in the loss; evaluation has fp32 logits anyway",
    )


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch, precision and memory of a run."""

    train_iters: int = option(
        0, "optimizer steps of the whole run, earlier ones of a resumed run included; required"
    )
    micro_batch_size: int = option(
        1, "packs that run through the models together; raise it while memory allows"
    )
    global_batch_size: int | None = option(
        None, "packs of one optimizer step; not given: one micro-batch on every data-parallel rank"
    )
    seq_length: int = option(
        2048, "tokens of a pack, the unit that the batch sizes count; documents share packs"
    )
    bf16: bool = option(False, "run the models in bfloat16, with fp32 master weights; not given: fp32")
    seed: int = option(1234, "seed of data order and random generators")
    eval_interval: int | None = option(
        None,
        "optimizer steps between evaluations; one more comes before the first step and "
        "one after the last. Not given or 0: never",
    )
    eval_iters: int = option(
        10,
        "global batches of one evaluation, at most; 0: never evaluate. Fewer than Megatron's 100, because packs of held-out "
        "text are full",
    )
    exit_interval: int | None = option(
        None, "stop (and save) at the first iteration that it divides; not given: at the end"
    )
    exit_duration_in_mins: float | None = option(
        None, "stop (and save) before this many minutes have passed; for time limits of a queue"
    )
    exit_signal_handler: bool = option(
        True,
        "SIGTERM, SIGUSR1 or Ctrl-C end the run after the step, with a checkpoint and exit code 75; else they kill it",
    )
    recompute_granularity: str | None = option(
        None,
        "save memory by computing the student's activations again in backward: of whole layers, or of attention only",
        choices=("full", "selective"),
    )
    recompute_method: str | None = option(
        None,
        "with full recomputation: uniform units of layers, or the first layers of every stage (block)",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = option(
        None,
        "with full recomputation: layers of a uniform unit, or layers that block recomputes in every stage",
    )
    optimizer_residency: str = option(
        "device",
        "where the optimizer state stays between updates: device, or host (pinned memory): less memory, slower",
        choices=RESIDENCIES,
    )
    deterministic_mode: bool = option(
        False, "only kernels that give the same bits in every run; slower on GPUs"
    )
    non_finite: str = option(
        "abort",
        "what a loss or gradient does that is NaN or infinite on any process: abort the run (exit code 70), or skip the update "
        "of that step and go on. Neither changes a parameter, both name models and samples",
        choices=("abort", "skip"),
    )
    max_non_finite_skips: int = option(
        10, "updates skipped in a row that end the run when one more would follow"
    )

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates held-out data and tasks; Megatron's --eval-iters 0 switches that off too."""
        return bool(self.eval_interval and self.eval_iters)


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how documents become packs."""

    data_path: tuple[str, ...] = option(
        (),
        "training data: one path, several, or WEIGHT PATH WEIGHT PATH ...; .jsonl, .json, .parquet or .arrow records, .txt "
        "lines, or the prefix of a tokenised .bin/.idx pair",
    )
    valid_data_path: tuple[str, ...] = option(
        (), "held-out data, in the same form; then all of --data-path is for training"
    )
    split: str = option(
        "100,0,0",
        "proportions of the documents for training, validation and test, when there is no "
        "--valid-data-path; 99,1,0 holds one in a hundred out",
    )
    characters_per_sample: int | None = option(
        None,
        "join consecutive text records with a newline until a document has at least so many characters; not given: every "
        "record (line of a .txt file) is a document",
    )
    tokenizer_type: str = option(
        "HuggingFaceTokenizer",
        "kind of tokenizer (Megatron's names)",
        choices=("HuggingFaceTokenizer", "SentencePieceTokenizer", "TiktokenTokenizer"),
    )
    tokenizer_model: str | None = option(
        None, "tokenizer folder, hub id, SentencePiece .model or .tiktoken file; not given: the student's"
    )
    pack: str = option(
        "bfd",
        "how documents fill packs: bfd (best fit, decreasing: hardly any padding), or none (one "
        "document a pack, padded)",
        choices=("bfd", "none"),
    )
    overlong: str = option(
        "split",
        "documents longer than --seq-length are split into pieces, truncated, or dropped",
        choices=("split", "truncate", "drop"),
    )
    max_bad_records: int = option(
        0,
        "records of a data file that may be left out because they cannot be read (broken JSON, no text, not UTF-8 ...); they "
        "are listed in quarantine.jsonl in the log folder. One more is an error that names the first ten",
    )
    append_eod: bool = option(True, "end every document with the end-of-text token")
    shuffle: bool = option(True, "draw packs in random order, another one in every epoch")
    num_workers: int = option(
        0,
        "processes that prepare batches ahead; 0: the training process itself. Raise it to 1 or 2 "
        "when a fast device waits for data",
    )
    data_cache_path: str | None = option(
        None, "folder of tokenised text, visible to all processes; not given: data_cache in the log folder"
    )
    eval_multiple_choice: tuple[str, ...] = option(
        (), "multiple-choice questions for evaluations: .jsonl files of question, choices and answer"
    )
    eval_completions: tuple[str, ...] = option(
        (), "completions whose likelihood evaluations measure: .jsonl files of prompt and completion"
    )
    eval_num_fewshot: int = option(0, "solved questions before each multiple-choice question")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = option(
        1e-4, "highest learning rate; 1e-4 suits a pruned student, a finished model wants about 1e-5"
    )
    min_lr: float = option(0.0, "learning rate that decay ends at, and never goes below")
    lr_decay_style: str = option(
        "cosine",
        "course of the learning rate after warm-up",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = option(None, "iteration at which decay has ended; not given: --train-iters")
    lr_warmup_iters: int = option(0, "first iterations, in which the learning rate rises linearly from 0")
    lr_warmup_fraction: float | None = option(
        None, "warm-up as a fraction (0 to 1) of the decay iterations, instead of --lr-warmup-iters"
    )
    lr_wsd_decay_style: str = option(
        "exponential",
        "course of the last phase of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = option(None, "iterations of the last phase of WSD; required with it")
    weight_decay: float = option(0.01, "decoupled weight decay; norms and biases have none")
    clip_grad: float = option(1.0, "global gradient norm above which gradients are scaled down; 0: never")
    adam_beta1: float = option(0.9, "decay of Adam's first moment")
    adam_beta2: float = option(
        0.999, "decay of Adam's second moment; 0.95 to 0.99 reacts faster in short runs"
    )
    adam_eps: float = option(1e-8, "added to the denominator of Adam's step")


@dataclass(frozen=True)
class CheckpointConfig:
    """Where the student is written, and where a run continues."""

    save: str | None = option(None, "folder for checkpoints; not given: none are written")
    load: str | None = option(
        None,
        "folder of checkpoints to continue from; usually that of --save, which may be empty: "
        "then the run starts from the student's own weights",
    )
    save_interval: int | None = option(
        None, "optimizer steps between checkpoints; the last step is always saved"
    )
    save_retain_interval: int | None = option(
        None,
        "keep the checkpoints of every N-th iteration, and of the others only the latest; not given: all stay",
    )
    keep_checkpoints: int | None = option(
        None, "keep the latest N checkpoints, besides those of --save-retain-interval; not given: all stay"
    )
    async_save: bool = option(
        False,
        "copy what is saved to host memory and write it while training goes on; needs host memory for each process's part",
    )
    ckpt_step: int | None = option(
        None,
        "iteration of --load to continue from; not given: the latest, or the newest whole one where that is damaged",
    )
    accept_change: tuple[str, ...] = option(
        (),
        "what may differ from the run that saved the checkpoint, as the error names it: data, tokenizer, loss, teacher ...",
    )
    export_hf: str | None = option(None, "folder in which the trained student becomes a Hugging Face model")


@dataclass(frozen=True)
class LogConfig:
    """What a run reports."""

    log_interval: int = option(
        1, "optimizer steps between progress lines and metrics records, which hold their means"
    )
    log_dir: str | None = option(
        None, "folder of metrics.jsonl and config.yaml; not given: that of --save, else runs/NAME"
    )
    name: str = option("kd", "name of the run, for its folder under runs/")
    tensorboard_dir: str | None = option(None, "folder for TensorBoard events; not given: none")
    wandb_project: str | None = option(
        None,
        "Weights & Biases project that metrics go to; not given: none. WANDB_MODE=offline keeps them in the log folder",
    )
    wandb_entity: str | None = option(
        None, "W&B user or team of the project; not given: the one that is logged in"
    )
    profile: bool = option(False, "profile the steps after --profile-step-start, up to --profile-step-end")
    profile_step_start: int = option(10, "iteration after which profiling starts")
    profile_step_end: int = option(
        12, "iteration after which profiling ends, and the memory history if the run does not fail"
    )
    use_pytorch_profiler: bool = option(
        False,
        "with --profile: write a trace of torch.profiler to profile/ in the log folder; without it the steps are marked for "
        "nsys profile --capture-range=cudaProfilerApi",
    )
    profile_ranks: tuple[str, ...] = option(("0",), "ranks that are profiled")
    record_memory_history: bool = option(
        False,
        "keep the history of GPU memory until --profile-step-end, or until the run fails, and write it to profile/ in the log "
        "folder, on --profile-ranks; see pytorch.org/memory_viz",
    )


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    student: StudentConfig = StudentConfig()
    teachers: tuple[TeacherConfig, ...] = ()
    parallel: ParallelConfig = ParallelConfig()
    kd: KDConfig = KDConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    device_memory_gib: float | None = option(
        None,
        "memory of one GPU in GiB (an 80 GB one has 79.1, an H200 139.8): the plan then says whether the run fits, and what to "
        "change if not",
    )
    dry_run: bool = option(
        False,
        "check flags, models, tokenizers, layout, disk and the first records of the data, show the plan, end before anything "
        "is loaded; only a run itself reads all of the data and compares what --load has saved",
    )
