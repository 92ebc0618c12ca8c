"""Check the expected share of a teacher's forwards against packs that are dealt as in a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from mkd.config.load import load_config
from mkd.config.schema import Config
from mkd.data.tags import TeacherRoutes
from mkd.kinds.loss_card import loss_card
from mkd.kinds.routed.tag_shares import TagShares
from mkd.plan.advice.forecast_text import describe_forecast
from mkd.plan.advice.own_processes import describe_sides
from mkd.plan.forecast import Forecast
from mkd.plan.models.parameters import model_parameters
from mkd.plan.teacher_split import PlannedSplit
from tests.plan.shapes import STUDENT, TEACHER
from tests.run_facts import facts_of

FILES = {"a.jsonl": "math", "b.jsonl": "code", "c.jsonl": "law"}
NAMES = "math", "code", "law"
BLEND = [0.7, "a.jsonl", 0.25, "b.jsonl", 0.05, "c.jsonl"]


def routed(folder: Path, *argv, data_path=BLEND, tags=FILES, teachers=NAMES, **kd) -> Config:
    settings = dict(
        student={"hf": "s"},
        teachers=[{"name": f"of-{tag}", "hf": "t", "tags": [tag] if tag else []} for tag in teachers],
        kd=dict(teacher_combination="route", kd_ratio=0.5) | kd,
        data=dict(data_path=data_path, data_tags=tags),
        training=dict(train_iters=1, seq_length=8192, global_batch_size=128, bf16=True),
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return load_config(["--config", str(folder / "run.yaml"), *map(str, argv)]).config


def forecast(config: Config, world_size: int = 8, heads: int = 0) -> Forecast:
    """Return the forecast; the last `heads` teachers have only their heads in these processes."""
    running = len(config.teachers) - heads
    return Forecast.from_facts(
        facts_of(config, world_size, STUDENT, (TEACHER,) * running, heads=(TEACHER,) * heads)
    )


def test_weights_of_files_are_shares_of_tags(tmp_path):
    found = TagShares.of(routed(tmp_path))
    assert found.is_known and found.shares == pytest.approx({"math": 0.7, "code": 0.25, "law": 0.05})
    assert [found.of_teacher(f"of-{tag}") for tag in FILES.values()] == pytest.approx([0.7, 0.25, 0.05])
    records = TagShares.of(routed(tmp_path, tag_key="tag"))
    assert not records.is_known and set(records.shares.values()) == {1 / 3}
    others = TagShares.of(routed(tmp_path, tag_key="tag", teachers=("math", "")))
    assert [others.of_teacher(name) for name in ("of-math", "of-")] == [0.5, 0.5]
    plain = [*BLEND[1::2]]
    assert not TagShares.of(routed(tmp_path, data_path=plain)).is_known


@pytest.mark.parametrize("in_step", [1, 2, 4])
def test_shares_are_those_of_packs_that_are_dealt(tmp_path, in_step):
    """200 global batches of 128 packs on 8 replicas, of which so many neighbours compute in step."""
    found, random = TagShares.of(routed(tmp_path)), np.random.default_rng(1)
    names = ("code", "law", "math")
    groups = [range(first, first + in_step) for first in range(0, 8, in_step)]
    routes = [TeacherRoutes.of(found.rules, names, {f"of-{tag}": one for tag in names}) for one in groups]
    runs = np.zeros(3)
    for _ in range(200):
        tags = np.sort(random.choice(3, 128, p=[found.shares[tag] for tag in names])).reshape(16, 8, 1)
        runs += np.mean([one.needed(row) for one in routes for row in tags], axis=0)
    expected = [found.of_teacher(f"of-{tag}", in_step, 128) for tag in names]
    assert runs / 200 == pytest.approx(expected, abs=0.01)


def test_a_plan_counts_the_forwards_that_run(tmp_path):
    """Three teachers of three tags take the time of one, and every weight is there."""
    one = forecast(routed(tmp_path, teachers=("",), tags={}, teacher_combination="weighted_sum"))
    three = forecast(routed(tmp_path))
    assert one.teachers[0].share == 1
    assert three.planned_step_ms() == pytest.approx(one.planned_step_ms(), rel=1e-9)
    assert three.flops_per_step == pytest.approx(one.flops_per_step)
    more = 2 * model_parameters(TEACHER).total * 2 / 2**30
    assert three.planned_gib - one.planned_gib == pytest.approx(more, rel=0.05)
    text = describe_forecast(three)
    assert "teacher of-math: runs in 0.7 of the micro-batches of a process" in text
    assert "teachers by tag: share of the packs for which each runs: of-math 0.7, of-code 0.25" in text


def test_a_plan_counts_the_rows_that_processes_of_their_own_are_asked_for(tmp_path):
    """Time, FLOPs and states of a teacher are those of its tags' packs."""
    config = routed(tmp_path)
    first, *others = config.teachers
    config = replace(config, teachers=(*others, replace(first, processes=2)))
    found = forecast(config, heads=1)
    (side,) = found.sides
    assert side.share == side.teacher.share == pytest.approx(0.7)
    assert side.step_ms(120) == pytest.approx(0.7 * replace(side, share=1.0).step_ms(120))
    assert found.flops_per_step == pytest.approx(forecast(routed(tmp_path)).flops_per_step)
    split = PlannedSplit(found, side)
    assert split.link_bytes == pytest.approx(0.7 * split.microbatches * side.state_bytes(), rel=0.01)
    (line,) = describe_sides(found)
    assert "micro-batches ahead, in 0.7 of them: " in line


def test_tags_with_weights_take_a_pass_each(tmp_path):
    """The cross entropy passes the head once more."""
    weights = {"math": 1, "code": 1, "law": 2}
    plain, weighted = (forecast(routed(tmp_path, **kd)) for kd in ({}, {"tag_weights": weights}))
    ratio = weighted.facts.cost.head_ms / plain.facts.cost.head_ms
    student, teacher = 6 * 2048, 2 * 4096
    assert ratio == pytest.approx((2 * student + teacher) / (student + teacher))


def test_the_loss_card_names_the_shares(tmp_path):
    card = loss_card(routed(tmp_path), STUDENT, (TEACHER,) * 3)
    assert "of-math 0.7, of-code 0.25, of-law 0.05; of tags: math 0.7, code 0.25, law 0.05" in card
    assert "(weights of --data-path)" in card
    records = loss_card(routed(tmp_path, tag_key="tag"), STUDENT, (TEACHER,) * 3)
    assert "(assumed: all tags are equally frequent)" in records
