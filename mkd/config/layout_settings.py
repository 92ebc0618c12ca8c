"""Settings of the layout: how processes share the models and the batch."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import option


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
        "micro-batches whose teacher states a process may hold (at least 2), so that teachers run ahead of "
        "the student while its pipeline waits. auto: twice the pipeline "
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
