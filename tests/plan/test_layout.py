from __future__ import annotations

import pytest

from mkd.errors import UsageError
from mkd.plan.layout import PipelineLayout, count_virtual_stages, nearly_even
from tests.reported import Reported


def test_even_layout_and_its_chunks():
    layout = PipelineLayout.even(8, pipeline_parallel=2, virtual_stages=2)
    assert layout.layers == (2, 2, 2, 2)
    assert layout.for_rank(0, 0) == (0, 2)
    assert layout.for_rank(1, 0) == (2, 2)
    assert layout.for_rank(0, 1) == (4, 2)
    assert layout.for_rank(1, 1) == (6, 2)


def test_thirty_layers_on_four_stages_is_an_error_with_a_split_that_works():
    with pytest.raises(UsageError) as caught:
        PipelineLayout.even(30, 4)
    error = caught.value
    assert error.code == "layers-not-divisible" and error.why
    assert error.do == "use --student-pipeline-layout 8,8,7,7 or --pipeline-layout auto"
    assert PipelineLayout.parse("8,8,7,7", 30, 4).layers == (8, 8, 7, 7)


def test_uneven_interleaving_names_both_sizes_and_the_flag():
    with pytest.raises(UsageError) as caught:
        PipelineLayout.even(10, 2, 2, flag="--teacher-pipeline-layout")
    assert "2 pipeline stages x 2 virtual stages = 4" in caught.value.what
    assert "--teacher-pipeline-layout 3,3,2,2 " in caught.value.do


def test_more_stages_than_layers():
    with pytest.raises(UsageError) as caught:
        PipelineLayout.even(2, 4)
    assert caught.value.code == "layers-not-divisible" and "fewer" in caught.value.do


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("8,8,7,7", (8, 8, 7, 7)),
        (" 8, 8,7 ,7", (8, 8, 7, 7)),
        ("Et*8|t*8|t*7|t*7L", (8, 8, 7, 7)),
        ("Et*8,|t*8,|t*7|t*7,L", (8, 8, 7, 7)),
        ("E|t*15|t*15|L", (0, 15, 15, 0)),
        ("Ettt|(tt|)*2t*23L", (3, 2, 2, 23)),
    ],
)
def test_both_notations(text, layers):
    assert PipelineLayout.parse(text, 30, 4).layers == layers


@pytest.mark.parametrize("text", ["Et*8|t*8|t*7|t*7L", "E|t*15|t*15|L", "Ettt|(tt|)*2t*23L"])
def test_megatron_reads_its_notation_alike(text):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    theirs = PipelineParallelLayerLayout(text, 4)
    ours = PipelineParallelLayerLayout(PipelineLayout.parse(text, 30, 4).to_megatron(), 4)
    assert ours.layout == theirs.layout
    ours.validate_layer_layout(num_layers=30, mtp_num_layers=None)


def test_megatron_places_interleaved_chunks_alike():
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = PipelineLayout.parse("1,2,3,4", 10, 2, 2)
    theirs = PipelineParallelLayerLayout(layout.to_megatron(), 2)
    for rank in range(2):
        for stage in range(2):
            kinds = [kind.name for kind in theirs.layout[rank][stage]]
            assert kinds.count("decoder") == layout.for_rank(rank, stage)[1]
    assert layout.for_rank(1, 1) == (6, 4)


@pytest.mark.parametrize(
    ("text", "code", "do"),
    [
        ("8,8,14", "layout-not-valid: stages, the pipeline has", "8,8,7,7"),
        ("8,8,8,8", "layout-not-valid: layers, the model has", "8,8,7,7"),
        ("15,0,0,15", "layout-not-valid: without a layer", "8,8,7,7"),
        ("tE|t|t|L", "layout-not-valid: is not a layout", "8,8,7,7"),
        ("8;8;7;7", "layout-not-valid: is not a layout", "Et*8|t*8|t*7|t*7L"),
        ("Et*30m|t|t|L", "layout-not-valid: is not a layout", "8,8,7,7"),
        ("-1,11,10,10", "layout-not-valid: is not a layout", "8,8,7,7"),
    ],
)
def test_wrong_layouts(text, code, do):
    with pytest.raises(UsageError) as caught:
        PipelineLayout.parse(text, 30, 4, flag="--teacher-pipeline-layout")
    error = caught.value
    assert Reported.of(error) == code and error.why
    assert error.what.startswith(f"--teacher-pipeline-layout {text} ")
    assert do in error.do and "--teacher-pipeline-layout" in error.do


def test_create_parses_what_is_given():
    assert PipelineLayout.create(None, 30, 2).layers == (15, 15)
    assert PipelineLayout.create("16,14", 30, 2).layers == (16, 14)
    assert PipelineLayout.create(None, 30, 1).to_megatron() == [["embedding", *["decoder"] * 30, "loss"]]


def test_nearly_even_keeps_every_layer():
    assert nearly_even(30, 4) == "8,8,7,7"
    assert nearly_even(8, 4) == "2,2,2,2"


def test_virtual_stages_of_both_flags():
    assert count_virtual_stages(8, 2) == 1
    assert count_virtual_stages(8, 2, num_virtual_stages=2) == 2
    assert count_virtual_stages(8, 2, layers_per_virtual_stage=1) == 4
    with pytest.raises(UsageError) as caught:
        count_virtual_stages(30, 4, layers_per_virtual_stage=2)
    assert Reported.of(caught.value) == "layers-not-divisible: num-layers-per-virtual-pipeline-stage"
    assert "--num-virtual-stages-per-pipeline-rank" in caught.value.do
