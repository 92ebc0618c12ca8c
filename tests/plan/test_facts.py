"""Check that facts are resolved once, and that plans know features only by the work that they add."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mkd.config.schema import XTokenConfig
from mkd.errors import UsageError
from mkd.plan import facts as module
from mkd.plan.advice.forecast_text import describe_forecast
from mkd.plan.facts import RunFacts
from mkd.plan.forecast import Forecast
from mkd.plan.work import Work
from tests.plan.shapes import STUDENT, TEACHER, config, several
from tests.reported import Reported
from tests.run_facts import facts_of

PLAN = Path(module.__file__).parent
REMEDIES = "verdict.py"  # may lower --rollout-slots

BASE = ("--student-hf", "s", "--data-path", "d", "--train-iters", 1, "--global-batch-size", 8)
PP4 = ("--pipeline-model-parallel-size", 4, "--pipeline-layout", "auto")
ROLLOUTS = ("--on-policy-fraction", 1, "--prompt-data-path", "p", "--max-new-tokens", 64)
GRPO = (*ROLLOUTS, "--reward", "rewards:exact", "--samples-per-prompt", 8, "--kd-ratio", 0.2)


def test_a_forecast_derives_everything_once(monkeypatch):
    derived = []
    for name in ("pair_cost", "plan_teachers", "count_virtual_stages", "auto_layouts", "teacher_names"):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name), derived))
    planned = Forecast.from_facts(facts_of(config(*BASE, *PP4), 4, STUDENT, [TEACHER]))
    describe_forecast(planned)
    planned.figures()
    names = ["auto_layouts", "count_virtual_stages", "pair_cost", "plan_teachers", "teacher_names"]
    assert sorted(derived) == names
    describe_forecast(planned.with_config(config(*BASE, *PP4, "--tensor-model-parallel-size", 1)))
    assert sorted(derived) == sorted(2 * names), "another configuration has other facts"


def counted(name: str, derive, derived: list[str]):
    def call(*args, **kwargs):
        derived.append(name)
        return derive(*args, **kwargs)

    return call


def test_what_cannot_be_resolved_raises_at_every_read():
    facts = facts_of(config("--global-batch-size", 3), 2, STUDENT)
    for _ in range(2):
        with pytest.raises(UsageError) as caught:
            _ = facts.batch
        assert Reported.of(caught.value) == "batch-not-divisible: is not divisible by"


def test_which_teachers_run():
    """A stored teacher is the only one in a run without problems. Checks see others one by one."""
    both, mixed = several({}, {}), several({"topk": "cache"}, {})
    assert tuple(RunFacts(both, 1).running) == RunFacts(both, 1).read_teachers == (0, 1)
    assert list(RunFacts(mixed, 1).running) == [1] and RunFacts(mixed, 1).read_teachers == (1,)
    plain = replace(both, kd=replace(both.kd, kd_ratio=0.0))
    assert not RunFacts(plain, 1).running and not RunFacts(plain, 1).read_teachers
    assert [RunFacts(one, 1).has_only_heads for one in (both, mixed)] == [True, False]


def test_a_teacher_of_unknown_shape_keeps_its_place():
    facts = facts_of(several({}, {"name": "second"}), 1, None, [None, TEACHER])
    (model,) = facts.models
    assert (model.role, model.teacher) == ("teacher second", 1) and not facts.is_known


def test_virtual_stages_follow_from_the_student():
    by_layers = config("--pipeline-model-parallel-size", 2, "--num-layers-per-virtual-pipeline-stage", 7)
    assert facts_of(by_layers, 2, STUDENT).virtual_stages == 2
    assert facts_of(by_layers, 2).virtual_stages == 1, "as set, if the student is not known"


def test_models_that_read_the_students_tokens():
    small, other = replace(TEACHER, vocab_size=1000), replace(TEACHER, vocab_size=10)
    settings = several({}, {"xtoken": XTokenConfig()})
    pair = facts_of(settings, 1, STUDENT, [small, other]).pair
    assert pair.same_tokens == (STUDENT, small) and pair.known_ids == 1000


def test_features_add_their_work():
    assert facts_of(config()).work == Work() == RunFacts(config(), 1).work
    dpo, one, several_updates = (
        facts_of(config(*flags)).work
        for flags in (("--dpo-beta", 0.1), (*GRPO,), (*GRPO, "--rollout-updates", 3, "--rollout-slots", 9))
    )
    assert dpo == Work(scores_tokens=True)
    assert (one.own_head_pass, one.scores_tokens, one.scores_for_metrics) == (True, False, True)
    assert (several_updates.updates, several_updates.scores_tokens, several_updates.slots) == (3, True, 9)
    (line,) = one.lines
    assert line(8).startswith("a step trains on 1 prompt x 8 = 8 completions of at most 64 tokens")
    assert facts_of(config(*ROLLOUTS, "--rollout-source", "server")).work.slots == 0


def test_other_settings_have_other_work():
    facts = facts_of(config(*ROLLOUTS, "--rollout-slots", 8), 1, STUDENT, [TEACHER])
    more = replace(facts, config=config(*ROLLOUTS, "--rollout-slots", 16))
    assert (facts.work.slots, more.work.slots) == (8, 16)


def test_plans_read_no_settings_of_features():
    reads = re.compile(r"config\.(dpo|simpo|grpo|pair_loss|rollout)\b")
    found = {
        path.name
        for path in PLAN.rglob("*.py")
        if path.parent.name != "checks" and reads.search(path.read_text(encoding="utf-8"))
    }
    assert found == {REMEDIES}
