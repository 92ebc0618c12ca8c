"""Matrices of one value are named while a model is loaded, and such an embedding is refused."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from mkd.checkpoint.one_value import one_value
from mkd.errors import MkdError
from tests.tiny_models import make_model

ZEROS, HALVES, PART = (
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.2.self_attn.o_proj.weight",
    "model.layers.3.mlp.up_proj.weight",
)


def fill(source: Path, folder: Path, **values: float) -> Path:
    """Copy a model with one value in the tensors of these names, or in the second half of their rows."""
    shutil.copytree(source, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, value in values.items():
            if name in tensors:
                tensors[name][len(tensors[name]) // 2 if name == PART else 0 :] = value
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_one_value():
    for shape in ((40, 24), (3, 40, 24), (1, 32), (32, 1)):
        for value in (0.0, -1.5):
            matrix = torch.full(shape, value, dtype=torch.bfloat16)
            assert one_value(matrix) == value
            for place in range(matrix.numel()):
                other = matrix.clone()
                other.view(-1)[place] = 2.0
                assert one_value(other) is None
    assert one_value(torch.zeros(640)) is None  # a bias


def load_parts(folder: Path, tp: int) -> tuple[str, list[str]]:
    """Load a model as a teacher; return the error, if there is one, and the notes."""
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint
    from mkd.config.models import TeacherConfig
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.models.model_shape import ModelShape
    from mkd.plan.parallel_sizes import Sizes
    from mkd.platform import detect
    from mkd.resolve.model_source import ModelSource
    from mkd.run.build_models import build_teacher_parts

    class Lines(logging.Handler):
        def emit(self, record):
            notes.append(record.getMessage())

    notes, lines, log = [], Lines(), logging.getLogger("mkd")
    stages = dist.get_world_size() // tp
    context = ParallelContext.create(detect(), Sizes(tensor=tp, pipeline=stages))
    shape = ModelShape.from_hf_dir(folder)
    layout = PipelineLayout.even(shape.num_layers, stages)
    log.addHandler(lines)
    try:
        source = ModelSource(shape, folder, HFCheckpoint(folder), None)
        build_teacher_parts(source, TeacherConfig(), layout, ModelOptions(), context)
    except MkdError as error:
        return error.report(), notes
    finally:
        log.removeHandler(lines)
    return "", notes


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.mark.parametrize(("world", "tp"), [(1, 1), (2, 2), (2, 1)])
def test_every_rank_names_the_same_matrices(world, tp, llama, tmp_path, ranks):
    """A rank at TP 2 reads nothing but zeros of the last one, whose other half has values."""
    folder = fill(llama, tmp_path / "model", **{ZEROS: 0, HALVES: 0.5, PART: 0})
    expected = f"note: 2 matrices hold one value everywhere in {folder}: {ZEROS} (0), {HALVES} (0.5). Such"
    for error, notes in ranks.run(load_parts, world, folder, tp):
        (note,) = [one for one in notes if "one value" in one]
        assert not error and note.startswith(expected), (error, notes)


def test_whole_weights_have_no_note(llama, ranks):
    for error, notes in ranks.run(load_parts, 2, llama, 2):
        assert not error and not [one for one in notes if "one value" in one]


def test_an_embedding_that_nobody_filled_is_refused(llama, tmp_path, ranks):
    folder = fill(llama, tmp_path / "model", **{"model.embed_tokens.weight": 0})
    for error, _ in ranks.run(load_parts, 2, folder, 2):
        assert "error[hf-files-damaged]" in error
        assert "every element of model.embed_tokens.weight is 0" in error
