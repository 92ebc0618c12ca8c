"""Check the groups that follow from the axes against Megatron's; a second context has another layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mkd.parallel.axes import ABSENT, AXES, EXPERT_AXES, EXPERT_SPANS, SPANS, STAGES, grid_groups
from mkd.parallel.context import ParallelContext
from mkd.plan.parallel_sizes import ONE_PROCESS, Sizes
from mkd.platform import detect
from tests.tiny_models import make_model

LAYOUTS_OF_4 = (
    Sizes(tensor=2, pipeline=2),
    Sizes(context=2, tensor=2),
    Sizes(pipeline=4),
    Sizes(context=2),
    Sizes(expert=4),
    Sizes(expert=2, tensor=2),
    Sizes(expert=2, pipeline=2),
)
FIELDS = (*SPANS, *EXPERT_SPANS, *STAGES, *ABSENT)


def test_every_group_of_megatron_has_a_span():
    from dataclasses import fields
    from importlib.metadata import version

    from megatron.core.process_groups_config import ProcessGroupCollection

    theirs, ours = {field.name for field in fields(ProcessGroupCollection)}, set(FIELDS)
    assert ours <= theirs
    assert ours == theirs or not version("megatron-core").startswith("0.16."), "later ones add groups"
    assert {axis for span in SPANS.values() for axis in span} == set(AXES)
    assert {axis for span in EXPERT_SPANS.values() for axis in span} == set(EXPERT_AXES)


def test_grid_groups_by_hand():
    sizes = {"tp": 2, "cp": 1, "dp": 3, "pp": 2}
    assert grid_groups(sizes, ["tp"]) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert grid_groups(sizes, ["dp"]) == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert grid_groups(sizes, ["tp", "pp"]) == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert grid_groups(sizes, []) == [[rank] for rank in range(12)]


def members(context: ParallelContext) -> dict[str, list[int] | None]:
    """Return the global ranks of each group of a context, by field."""
    groups = {field: getattr(context.groups, field) for field in FIELDS}
    return {field: group and dist.get_process_group_ranks(group) for field, group in groups.items()}


def both_members(layout: Sizes) -> tuple[dict, dict]:
    """Return the members of Megatron's groups at `layout` and of a second context's at the same layout.

    The third result is that of a context with other groups of experts, set back to those of `layout`.
    """
    first = ParallelContext.create(detect(), layout)
    second = first.with_layout(layout)
    others = first.with_layout(replace(layout, expert=1))
    third = others.with_expert_parallel(first.ep.size)
    assert members(third) == members(first)
    places = [{name: (axis.rank, axis.size) for name, axis in one.axes.items()} for one in (first, second)]
    assert places[0] == places[1]
    found = members(first), members(second)
    second.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS_OF_4, ids=str)
def test_groups_are_those_of_megatron(layout, ranks):
    for megatron, ours in ranks.run(both_members, 4, layout):
        assert ours == megatron


def scores(folder: str, first: Sizes, second: Sizes | None) -> np.ndarray:
    """Return log-likelihoods of a model under `first`, or under a `second` context created beside it."""
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint
    from mkd.checkpoint.hf.hf_weights import load_hf_weights
    from mkd.evaluation.requests import Request
    from mkd.evaluation.scores import RequestBatches, log_likelihoods
    from mkd.models.builder import build_model_parts
    from mkd.models.transformer_config import ModelOptions
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.models.model_shape import ModelShape

    context = ParallelContext.create(detect(), first)
    if second is not None:
        context = context.with_layout(second)
    shape = ModelShape.from_hf_dir(folder)
    layout = PipelineLayout.even(shape.num_layers, context.pp.size)
    models = build_model_parts(shape, layout, ModelOptions(), context)
    for model in models:
        load_hf_weights(model, shape, HFCheckpoint(folder), context, model.first_layer)
    ids = torch.randint(shape.vocab_size, (6, 16), generator=torch.Generator().manual_seed(0)).numpy()
    requests = [Request(row, row[-9:], False) for row in ids.astype(np.int32)]
    batches = RequestBatches.of(requests, context, micro_batch_size=1, seq_length=16, pad_id=0)
    return log_likelihoods(models, batches)


TENSOR, CONTEXT, PIPELINE = Sizes(tensor=2), Sizes(context=2), Sizes(pipeline=2)


@pytest.mark.parametrize(
    ("first", "second"),
    [(TENSOR, ONE_PROCESS), (TENSOR, CONTEXT), (TENSOR, PIPELINE), (PIPELINE, TENSOR)],
    ids=["tp-dp", "tp-cp", "tp-pp", "pp-tp"],
)
def test_a_model_under_a_second_context_equals_one_under_the_first(first, second, ranks, tmp_path):
    folder = str(make_model(tmp_path / "model", "qwen3"))
    expected = ranks.run(scores, 2, folder, second, None)
    for alone, beside in zip(expected, ranks.run(scores, 2, folder, first, second), strict=True):
        assert np.array_equal(alone, beside)
