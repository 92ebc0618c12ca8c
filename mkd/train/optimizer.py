"""Wrap the student in Megatron's DDP and optimizer, and check that a step is finite before its update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn

from mkd.checkpoint.hf.hf_rounded import RoundedWeights
from mkd.config.schema import Config
from mkd.models.stage import DistillationStage
from mkd.operations.stopping import StepAgreement, without_peers
from mkd.parallel.context import ParallelContext
from mkd.platform.megatron_versions import gradients_in_norm
from mkd.train.moving_average import MovingAverage
from mkd.train.optimizer_residency import OptimizerResidency


def wrap_stages(
    stages: Sequence[DistillationStage],
    config: Config,
    context: ParallelContext,
    after_backward: Callable[[], None] | None = None,
) -> list[DistributedDataParallel]:
    """Give every model part Megatron's gradient buffers, and set the schedule's callbacks.

    `after_backward` runs after the last backward of a step, before ranks wait for each other's gradients.
    Gradients are summed, never averaged: the loss is already divided by the loss tokens of the global batch.
    """
    parallel = config.parallel
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
    )
    wrap = partial(DistributedDataParallel, ddp_config=ddp_config, pg_collection=context.groups)
    # As Megatron suggests: one bucket for each later part of an interleaved schedule.
    wrapped = [wrap(stage.config, module=stage, disable_bucketing=i > 0) for i, stage in enumerate(stages)]
    for one in wrapped:
        _store_padding(one)
    for stage in stages:
        stage.config.finalize_model_grads_func = partial(_finalize, after_backward)
        accumulate_inside_products(stage)
    first = stages[0].config  # Megatron's schedules read the settings of the first part alone
    if parallel.overlap_grad_reduce:
        first.no_sync_func = [stage.no_sync for stage in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
        if len(wrapped) > 1:
            first.grad_sync_func = [stage.start_grad_sync for stage in wrapped]
    if parallel.overlap_param_gather and len(wrapped) > 1:
        first.param_sync_func = [stage.start_param_sync for stage in wrapped]
    return wrapped


def _store_padding(wrapped: DistributedDataParallel) -> None:
    """Let the distributed optimizer's checkpoints have the padding behind each bucket of gradients.

    Megatron joins the buckets without their padding, then cuts parameters at places that count it: behind the
    first padded bucket, each parameter would get moments of its neighbour, and the last ones zeros.
    """
    for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = buffer.numel


def accumulate_inside_products(model: nn.Module) -> None:
    """Let Transformer Engine's layers add weight gradients to the fp32 buffers inside the matrix products.

    Megatron's own flag, gradient_accumulation_fusion, requires apex, but only Megatron's own linear layers
    need apex.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def _finalize(after_backward: Callable[[], None] | None, model, num_tokens, **kwargs) -> None:
    """Reduce gradients as Megatron does, without dividing by tokens: the objective has divided."""
    if after_backward:
        after_backward()
    finalize_model_grads(model, None, **kwargs)


class Update(NamedTuple):
    """The result of an update."""

    grad_norm: float  # before clipping
    agreed: StepAgreement  # parameters have changed only if `agreed.finite`


@dataclass(frozen=True)
class StudentOptimizer:
    """AdamW over the student, and its learning-rate schedule, which counts iterations with an update."""

    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    stages: list[DistributedDataParallel]
    residency: OptimizerResidency | None = None  # None: the state stays on the device
    rounded: RoundedWeights | None = None  # None: the student is not rounded
    averages: tuple[MovingAverage, ...] = ()  # of its weights, in teachers

    @contextmanager
    def exact_weights(self) -> Iterator[None]:
        """Hold the weights in the block as they were before they were rounded. It has `state_on_device`.

        Afterwards they have the same bits as before. Collective.
        """
        with self.state_on_device():
            if self.rounded is not None:
                copy_main_weights(self.optimizer)
            yield
        self.round_weights()

    def round_weights(self) -> None:
        """Round the weights, which must be exact, if the student is rounded. Collective."""
        if self.rounded is not None:
            self.rounded.round()

    def state_on_device(self) -> AbstractContextManager:
        """Return a context in which updates, saves and loads may read and write the optimizer's state."""
        return nullcontext() if self.residency is None else self.residency.on_device()

    def zero_grad(self) -> None:
        for stage in self.stages:
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()

    @property
    def learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def update(
        self,
        loss_sum: float,
        exchange: Callable[[bool], StepAgreement] = without_peers,
        ends_iteration: bool = True,  # False: another update of the iteration follows
    ) -> Update:
        """Check, clip and update.

        Unless all ranks are finite, parameters, state and schedule stay bit-identical. `exchange` gets True
        if the loss and all gradients of this rank are finite, and returns what all ranks agree on.
        """
        with self.state_on_device():
            self.optimizer.prepare_grads()  # first: norm and check read the main gradients that it fills
            # A collective, so every rank calls it before a check that may stop early on one of them.
            grad_norm = self.optimizer.get_grad_norm()
            is_finite = math.isfinite(loss_sum) and math.isfinite(grad_norm) and self._rest_is_finite()
            # Before weights and state change: if one rank is not finite, none may update.
            agreed = exchange(is_finite)
            if not agreed.finite:
                return Update(grad_norm, agreed)
            clip = self.optimizer.config.clip_grad
            if clip > 0:
                for inner in self.optimizer.chained_optimizers:  # weights of experts have their own
                    if parameters := inner.get_parameters():  # CUDA kernels crash without tensors
                        clip_grad_by_total_norm_fp32(parameters, clip, grad_norm)
            self.optimizer.step_with_ready_grads()
            for average in self.averages:  # of main weights, which are on the device now
                average.follow(self.optimizer)
        self.round_weights()  # every process has gathered them
        # After the update, which uses the rate of this iteration. Skipped updates return before it.
        self.scheduler.step(increment=int(ends_iteration))
        return Update(grad_norm, agreed)

    def _rest_is_finite(self) -> bool:
        """Check gradients that the norm leaves to another rank: replicas and tied embeddings."""
        norms: list[Tensor] = []
        for inner in self.optimizer.chained_optimizers:
            counted = {id(gradient) for gradient in gradients_in_norm(inner)}
            gradients = [parameter.grad for parameter in inner.get_parameters() if parameter.grad is not None]
            rest = [gradient for gradient in gradients if id(gradient) not in counted]
            norms += torch._foreach_norm(rest) if rest else []
        return not norms or bool(torch.stack(norms).isfinite().all())


def copy_main_weights(optimizer: MegatronOptimizer) -> None:
    """Fill the model's weights from the fp32 main weights, as an update does. Collective."""
    for inner in optimizer.chained_optimizers:
        if not inner.is_stub_optimizer:
            inner._copy_main_params_to_model_params()
        if isinstance(inner, DistributedOptimizer):
            for chunk in inner.model_chunks:
                chunk.start_param_sync()


def build_optimizer(
    stages: list[DistributedDataParallel],
    config: Config,
    context: ParallelContext,
    rounded: RoundedWeights | None = None,
    averages: Sequence[MovingAverage] = (),
) -> StudentOptimizer:
    """Build AdamW with fp32 state; biases and norm weights are not decayed (Megatron's rule).

    The student's weights must be exact. They are rounded after the main weights have been copied from them.
    """
    settings = config.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            bf16=config.training.bf16,
            params_dtype=stages[0].config.params_dtype,
            use_distributed_optimizer=config.parallel.use_distributed_optimizer,
            overlap_param_gather=config.parallel.overlap_param_gather,
        ),
        stages,
        use_gloo_process_groups=context.platform.is_cuda,
    )
    on_host = config.training.optimizer_residency == "host"
    residency = OptimizerResidency(optimizer, context.device) if on_host else None
    built = StudentOptimizer(
        optimizer,
        _scheduler(optimizer, config),
        stages,
        residency=residency,
        rounded=rounded,
        averages=tuple(averages),
    )
    built.round_weights()
    return built


def _scheduler(optimizer: MegatronOptimizer, config: Config) -> OptimizerParamScheduler:
    settings = config.optimizer
    decay_iters = settings.lr_decay_iters or config.training.train_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=decay_iters,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=config.training.train_iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run uses its own flags
        wsd_decay_steps=settings.lr_wsd_decay_iters,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )
