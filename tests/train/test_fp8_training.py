"""Check training with teachers in FP8, by the recipe for CPUs: ahead, several, exported; and refused here."""

from __future__ import annotations

import pytest

from mkd.config.load import load_config
from mkd.errors import ErrorList, MkdError
from tests.models.fp8_stand_in import stand_in_recipes
from tests.reported import reports
from tests.tiny_models import add_tokenizer, make_model
from tests.train import cross_tokenizer_invariance as cross
from tests.train.command import flags, make_files
from tests.train.invariance import Layout, make_pair
from tests.train.test_teacher_prefetch import ahead, assert_same, train_with_each, trained

FP8 = "--teacher-precision", "fp8", "--bf16"
SIZES = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)  # multiples of 16


def train_in_fp8(layout: Layout, student, teacher) -> None:
    """Train with an FP8 teacher, without forwards ahead and with them."""
    with stand_in_recipes():
        train_with_each(layout, student, teacher, (4,))


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("--teacher-residency", "host"), id="host", marks=pytest.mark.slow),
        pytest.param(
            ("--teacher-fp8-recipe", "blockwise", "--teacher-residency", "host"), id="blockwise, host"
        ),
    ],
)
def test_forwards_ahead_have_the_same_bits(more, ranks, tmp_path):
    """Evaluation and a skipped update are in between."""
    pair = make_pair(tmp_path, dict(num_hidden_layers=4))
    ranks.run(train_in_fp8, 2, Layout("PP2", 2, pp=2, flags=(*FP8, *more)), *pair)


def train_two_teachers(layout: Layout, files) -> None:
    """Train with a cross-tokenizer teacher, in FP8 too, beside one in bf16; from the host it goes ahead."""
    results = []
    with stand_in_recipes():
        for name, number in (("partition_kl", 0), ("device", 0), ("host", 4)):
            engine, state, batches, _ = cross.build(
                layout.with_flags((*ahead(number), "--bf16")), files, name
            )
            results.append(trained(engine, state.models, batches))
            engine.context.close()
    assert_same(*results[1:])
    assert results[0][0] != results[1][0], "FP8 rounds the teacher"


def test_one_of_several_teachers_is_in_fp8(ranks, tmp_path):
    files = cross.make_files(tmp_path, SIZES)
    text = (files / "partition_kl.yaml").read_text(encoding="utf-8")
    for place in ("device", "host"):
        own = f'"name": "cross", "precision": "fp8", "residency": "{place}"'
        (files / f"{place}.yaml").write_text(text.replace('"name": "cross"', own), encoding="utf-8")
    ranks.run(train_two_teachers, 2, Layout("PP2", 2, pp=2), files)


def command(folder, *more: str) -> list[str]:
    """Return the command line of a run whose teacher has fitting widths."""
    files = make_files(folder)
    add_tokenizer(make_model(files / "fitting", "llama", seed=2, num_hidden_layers=3, **SIZES))
    return flags(files, "run", *more, teacher_hf="fitting")


def export(argv: list[str], out, in_fp8: bool):
    """Return the description of the cache of an export, or the error's text."""
    import torch.distributed as dist

    from mkd.platform import detect
    from mkd.run.stored.cache_description import ExportSettings
    from mkd.run.stored.cache_export import export_teacher
    from mkd.run.stored.topk_export import TopKExport

    config = load_config([*argv, *(FP8 if in_fp8 else ("--bf16",))]).config
    with stand_in_recipes():
        try:
            found = export_teacher(config, TopKExport(ExportSettings(out, 100), 4, "float16"), detect(), 1)
        except MkdError as error:
            return str(error)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the pool leaves one
    return found


def test_an_export_is_of_one_precision(ranks, tmp_path):
    argv = command(tmp_path)
    (meta,) = ranks.run(export, 1, argv, tmp_path / "out", True)
    assert meta.precision == "fp8 tensorwise"
    (refusal,) = ranks.run(export, 1, argv, tmp_path / "out", False)
    assert "holds another teacher cache: precision differ" in refusal


def test_a_machine_without_fp8_refuses_before_anything_is_built(tmp_path):
    from mkd.run.one_model import plan_model
    from mkd.run.plan_run import plan_run

    config = load_config(command(tmp_path, *FP8)).config
    with pytest.raises(ErrorList) as caught:
        plan_run(config, 1)
    problems: list = []
    assert plan_model(problems, config, 1, 0) is None
    assert reports(caught.value) == reports(problems) == ["fp8-not-possible: needs a GPU"]
