"""Megatron's own training step of a student: its GPTModel, layers, cross entropy, schedule and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from mkd.checkpoint.hf.hf_weights import load_hf_weights
from mkd.data.batch import PackedBatch
from mkd.models.packed import packed_documents
from mkd.models.specs import block_spec
from mkd.models.transformer_config import ModelOptions, transformer_config
from mkd.parallel.context import ParallelContext
from mkd.resolve.run_plan import Plan
from mkd.train.optimizer import accumulate_inside_products, build_optimizer


def build_sft_step(
    plan: Plan,  # of a student without a pipeline
    context: ParallelContext,
    batches: Sequence[PackedBatch],  # of this data-parallel rank, on the device
) -> Callable[[], float]:
    """Return a call that makes one step and returns the mean loss of its tokens. Collective.

    The model has the weights, the packs and the optimizer of mkd's student, and Megatron's fused kernels:
    grouped products, permutation, cross entropy, weight gradients added inside products.
    """
    config, shape = plan.config, plan.student.shape
    has_te = context.platform.transformer_engine
    options = ModelOptions(torch.bfloat16 if config.training.bf16 else torch.float32)
    settings = transformer_config(shape, plan.facts.layouts.student, options, context)
    settings.cross_entropy_loss_fusion, settings.cross_entropy_fusion_impl = has_te, "te"
    model: nn.Module = GPTModel(
        settings,
        _layers(plan, settings, context),
        vocab_size=shape.padded_vocab_size(context.tp_size),
        max_sequence_length=shape.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(shape.ropes[0].theta),
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        pg_collection=context.groups,
    ).to(context.device)
    load_hf_weights(model, shape, plan.student.hf, context)
    model = Float16Module(settings, model) if config.training.bf16 else model
    parallel = config.parallel
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
    )
    wrapped = DistributedDataParallel(settings, ddp_config, model, pg_collection=context.groups)
    accumulate_inside_products(wrapped)
    settings.finalize_model_grads_func = finalize_model_grads
    if parallel.overlap_grad_reduce:
        settings.no_sync_func = wrapped.no_sync
    optimizer = build_optimizer([wrapped], config, context).optimizer
    return partial(_step, wrapped, optimizer, batches, has_te)


def _layers(plan: Plan, settings: TransformerConfig, context: ParallelContext) -> TransformerBlockSubmodules:
    """Return Megatron's layers. On a CPU, where it has none for packs, they are mkd's: a rehearsal."""
    if context.platform.transformer_engine:
        return get_gpt_decoder_block_spec(settings, use_transformer_engine=True)
    shape = plan.student.shape
    return block_spec(shape.layers, shape.ropes, False, groups=context.groups)


def _step(model: nn.Module, optimizer, batches: Sequence[PackedBatch], joins: bool) -> float:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, joins),
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=batches[0].tokens.numel(),
        micro_batch_size=1,
        forward_only=False,
    )
    optimizer.step()
    sums = torch.stack([report["loss"] for report in reports]).sum(0)
    dist.all_reduce(sums)  # every process has packs of its own
    total, count = sums.tolist()
    return total / count


def _forward_step(joins: bool, batches: Iterator[PackedBatch], model: nn.Module):
    batch = next(batches)
    packed = packed_documents(
        batch.cu_seqlens, batch.cu_seqlens_padded, batch.max_seqlen, padding_joins_document=joins
    )
    losses = model(
        batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=packed
    )  # [1, t]
    return losses, partial(_loss_sum, batch.loss_mask)


def _loss_sum(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, count = (losses.float() * mask).sum(), mask.sum()
    return total, count.int(), {"loss": torch.stack((total, count)).detach()}
