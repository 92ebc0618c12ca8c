from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.config.schema import Config, ParallelConfig, TrainingConfig
from mkd.errors import UsageError
from mkd.plan.batch import BatchPlan
from mkd.plan.parallel_sizes import Sizes


def config(tp=1, pp=1, cp=1, **training) -> Config:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp
    )
    return replace(Config(), parallel=parallel, training=TrainingConfig(**training))


def test_equation():
    plan = BatchPlan.from_config(config(tp=2, micro_batch_size=1, global_batch_size=8), world_size=4)
    assert (plan.data_parallel, plan.num_microbatches, plan.global_batch_size) == (2, 4, 8)
    assert plan.tokens_per_step == 16384
    assert plan.equation() == (
        "8 packs = 1 per micro-batch x 4 micro-batches x 2 data-parallel; 8 x 2048 = 16384 tokens a step"
    )


def test_default_is_one_microbatch_a_replica():
    plan = BatchPlan.from_config(config(pp=2, micro_batch_size=3, seq_length=16), world_size=8)
    assert (plan.num_microbatches, plan.global_batch_size, plan.tokens_per_step) == (1, 12, 192)


def test_indivisible_batch_names_the_nearest_ones():
    with pytest.raises(UsageError) as caught:
        BatchPlan.from_config(config(micro_batch_size=8, global_batch_size=100), world_size=4)
    assert caught.value.code == "batch-not-divisible" and caught.value.why
    assert caught.value.do == "use 96 or 128"


def test_batch_smaller_than_one_round_has_one_nearest():
    with pytest.raises(UsageError) as caught:
        BatchPlan.from_config(config(micro_batch_size=8, global_batch_size=4), world_size=1)
    assert caught.value.do == "use 8"


def test_left_over_processes():
    with pytest.raises(UsageError) as caught:
        BatchPlan.from_config(config(tp=2, pp=2), world_size=6)
    assert caught.value.code == "world-not-divisible" and "start a multiple of 4" in caught.value.do
    with pytest.raises(UsageError) as caught:
        BatchPlan.from_config(replace(config(tp=2, pp=2), dry_run=True), world_size=1)
    assert caught.value.what.startswith("1 process cannot be divided")
    assert "`mkd plan --world-size 4`" in caught.value.do and "torchrun" not in caught.value.do


def test_context_parallel_processes_share_their_packs():
    plan = BatchPlan.from_config(config(tp=2, cp=2, global_batch_size=6, seq_length=16), world_size=8)
    assert (plan.data_parallel, plan.num_microbatches, plan.tokens_per_step) == (2, 3, 96)


def test_documents_are_padded_only_for_context_parallelism():
    assert [Sizes(context=size).document_multiple for size in (1, 2, 3, 4)] == [1, 4, 6, 8]
