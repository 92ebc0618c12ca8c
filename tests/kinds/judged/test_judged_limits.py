"""Check what losses of judged answers refuse before anything is loaded."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from mkd.config.load import load_config
from mkd.kinds.judged.pair_losses.simpo import SimPO
from mkd.kinds.judged.pair_term import PairTerm
from mkd.kinds.judged.preferences import Pairs, pair_metrics
from tests.plan.checks.test_problems import BASE, codes, shape
from tests.reported import reports
from tests.run_facts import problems_of

DPO = ("--dpo-beta", "0.1", "--kd-ratio", "0")
SIMPO = ("--simpo-beta", "2", "--kd-ratio", "0")
FRESH = ("--on-policy-fraction", "1", "--prompt-data-path", "p.jsonl", "--max-new-tokens", "8")
GRPO = (*FRESH, "--reward", "rewards:exact", "--samples-per-prompt", "4", "--kd-ratio", "0")


def test_the_initial_student_is_the_reference_by_default():
    config = load_config([*BASE[:2], *BASE[4:], *DPO]).config
    assert problems_of(config, 1, shape(), [shape()]) == []
    assert [one.hf for one in config.teachers] == ["s"] and config.needs_models
    assert [one.hf for one in load_config([*BASE, *DPO]).config.teachers] == ["t"]
    assert load_config([*BASE[:2], *BASE[4:]]).config.teachers == ()


def test_a_teacher_without_a_model_says_where_the_initial_student_is():
    config = load_config([*BASE[:2], *BASE[4:], *DPO, "--teacher-residency", "host"]).config
    assert [(one.hf, one.residency) for one in config.teachers] == [("s", "host")]
    assert problems_of(config, 1, shape(), [shape()]) == []


@pytest.mark.parametrize(
    "flags, code",
    [
        (("--kd-ratio", "0.5"), "preferences-exclude: but kd-ratio is"),
        (("--kd-divergence", "reverse_kl"), "remove-flag: no effect"),
        (("--kd-temperature", "2"), "remove-flag: no effect"),
        (
            ("--on-policy-fraction", "1", "--prompt-data-path", "p.jsonl"),
            "preferences-exclude: but on-policy-fraction is",
        ),
        (("--teacher-topk", "cache"), "preferences-exclude: with teacher-topk"),
        (("--xtoken-loss", "uld"), "preferences-exclude: with a cross-tokenizer teacher"),
        (("--dpo-beta", "0"), "out-of-range: must be"),
        (("--simpo-beta", "2"), "exclude-each-other: exclude each other"),
    ],
)
def test_refused_beside_dpo(flags, code):
    assert code in codes(*DPO, *flags, student=shape(), teacher=shape())


@pytest.mark.parametrize("loss", [DPO, SIMPO])
@pytest.mark.parametrize("more", [(), ("--kd-divergence", "jsd")])
def test_a_parameter_of_a_divergence_is_to_be_removed_beside_pairs(loss, more):
    """Advice to choose its divergence would be refused too."""
    config = load_config([*BASE, *loss, *more, "--kd-jsd-beta", "0.3"]).config
    found = problems_of(config, 1, shape(), [shape()])
    assert [error.do for error in found] == ["remove it"] * (1 + bool(more))
    assert any(error.what.startswith("kd-jsd-beta 0.3 ") for error in found)


def test_simpo_runs_no_reference():
    config = load_config([*BASE[:2], *BASE[4:], *SIMPO]).config
    assert config.teachers == () and not config.needs_models
    assert codes(*SIMPO, student=shape(), teacher=shape()) == []
    assert codes(*SIMPO, "--simpo-gamma", "-1", student=shape(), teacher=shape()) == ["out-of-range: must be"]
    assert codes(*SIMPO, "--kd-ratio", "0.5", student=shape(), teacher=shape()) == [
        "preferences-exclude: but kd-ratio is"
    ]
    alone = load_config([*BASE[:2], *BASE[4:], "--simpo-beta", "2"]).config
    assert reports(problems_of(alone, 1, shape(), [])) == ["preferences-exclude: but kd-ratio is"]
    assert codes("--simpo-gamma", "2", student=shape(), teacher=shape()) == ["remove-flag: no effect"]


def test_the_loss_card_explains_lengths_only_where_the_formula_has_them():
    class OfSums(SimPO):
        def formula(self) -> str:
            return "-ln sigmoid(s_c - s_r)"

    config = load_config([*BASE, *SIMPO]).config
    for loss, explained in ((config.simpo, True), (OfSums(simpo_beta=2.0), False)):
        ((_, text),) = Pairs().card(replace(config, simpo=loss)).rows
        assert ("n its tokens" in text) == explained


def test_a_loss_may_have_metrics_of_parts_and_no_counterpart_in_trl():
    class WithLikelihood(SimPO):
        part_help = {"likelihood": "mean ln p of the chosen answer"}

        def in_trl(self) -> None:
            return None

        def parts(self, chosen, rejected):
            return {"likelihood": chosen.logp / chosen.length}

    loss = WithLikelihood(simpo_beta=2.0)
    assert PairTerm(loss).measures == ("simpo/margin", "simpo/accuracy", "simpo/likelihood")
    assert [one.name for one in pair_metrics(WithLikelihood)] == list(PairTerm(loss).measures)
    card = Pairs().card(replace(load_config([*BASE, *SIMPO]).config, simpo=loss))
    assert card.elsewhere == (("same in TRL", "nothing: it has no equal loss"),)


def test_one_reference_is_enough(tmp_path):
    (tmp_path / "two.yaml").write_text(json.dumps({"teachers": [{"hf": "a"}, {"hf": "b"}]}))
    argv = [*BASE[:2], *BASE[4:], *DPO, "--config", str(tmp_path / "two.yaml")]
    found = problems_of(load_config(argv).config, 1, shape(), [shape(), shape()])
    assert reports(found) == ["preferences-exclude: keep one of them"]


@pytest.mark.parametrize(
    "flags, code",
    [
        (("--reward", "exact"), "value-not-valid: is not module:function"),
        (("--on-policy-fraction", "0.5"), "reward-needs: but on-policy-fraction is"),
        (("--samples-per-prompt", "1"), "reward-needs: but samples-per-prompt is"),
        (("--rollout-temperature", "0.7"), "reward-needs: but rollout-temperature is"),
        (("--kd-ratio", "1"), "reward-needs: but kd-ratio is 1"),
        (("--dpo-beta", "0.1"), "preferences-exclude: but on-policy-fraction is"),
        (("--clip-range", "1"), "out-of-range: must be"),
        (("--rollout-updates", "0"), "out-of-range: must be"),
        (("--max-failed-rewards", "-1"), "out-of-range: must be"),
        (("--teacher-hf", "s", "--kd-ratio", "0.1"), "reward-needs: the reference is the initial"),
        (
            ("--teacher-hf", os.path.abspath("s"), "--kd-ratio", "0.1"),
            "reward-needs: the reference is the initial",
        ),
        (("--clip-range", "0.1"), "remove-flag: no effect"),
    ],
)
def test_refused_beside_rewards(flags, code):
    assert codes(*GRPO, student=shape(), teacher=shape()) == []
    assert code in codes(*GRPO, *flags, student=shape(), teacher=shape())


def test_the_reference_of_rewards_is_the_initial_student_if_there_is_a_divergence():
    argv = [*BASE[:2], *BASE[6:], *GRPO]
    assert load_config(argv).config.teachers == ()
    config = load_config([*argv, "--kd-ratio", "0.04", "--kd-divergence", "reverse_kl"]).config
    assert [one.hf for one in config.teachers] == ["s"]
    assert problems_of(config, 1, shape(), [shape()]) == []


def test_the_divergence_of_the_reference_itself_counts(tmp_path):
    (tmp_path / "own.yaml").write_text(json.dumps({"teachers": [{"divergence": "forward_kl"}]}))
    own = ("--config", str(tmp_path / "own.yaml"), "--kd-ratio", "0.1", "--kd-divergence", "reverse_kl")
    config = load_config([*BASE[:2], *BASE[6:], *GRPO, *own]).config
    assert "reward-needs: the reference is the initial" in reports(problems_of(config, 1, shape(), [shape()]))


def test_settings_of_rewards_have_no_effect_without_one():
    for flags in (("--clip-range", "0.1"), ("--rollout-updates", "2"), ("--reward-timeout-s", "3")):
        assert codes(*flags, student=shape(), teacher=shape()) == ["remove-flag: no effect"]
