"""Check that the loss card shows the objective that is trained, and other engines' equivalent settings."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mkd.config.models import XTOKEN_LOSSES
from mkd.config.schema import XTokenConfig
from mkd.kinds.context.context_settings import ContextConfig
from mkd.kinds.loss_card import loss_card, rescaled
from tests.plan.shapes import STUDENT, TEACHER, config, several


def card(*argv: str | int, teacher=TEACHER) -> dict[str, str]:
    """Return label -> text."""
    return rows(loss_card(config(*argv), STUDENT, [teacher]))


def rows(text: str) -> dict[str, str]:
    head, *lines = text.splitlines()
    assert head == "loss card"
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines)


def test_the_numbers_are_those_of_the_run():
    found = card("--kd-ratio", 0.25, "--kd-temperature", 2)
    assert found["loss"] == "0.75 CE + 0.25 KD, nats per token"
    assert found["KD"] == "4 x KL(p_t || p_s); p = softmax(logits / T), T = 2 (T^2)"
    assert found["vocabulary"] == "all 151936 rows of both models"
    unscaled = card(
        "--kd-temperature", 2, "--kd-temperature-scaling", "none", "--kd-divergence", "reverse_kl"
    )
    assert unscaled["KD"].startswith("1 x KL(p_s || p_t)") and "no T^2" in unscaled["KD"]
    jsd = card("--kd-divergence", "jsd", "--kd-jsd-beta", 0.25)
    assert jsd["KD"].startswith("1 x (0.25 KL(p_t || m) + 0.75 KL(p_s || m)), m = 0.25 p_t + 0.75 p_s")
    assert card("--kd-divergence", "jsd", "--kd-jsd-beta", 1)["KD"].startswith("1 x KL(p_s || p_t)")
    skewed = card("--kd-divergence", "skewed_reverse_kl", "--kd-skew-alpha", 0.25)
    assert skewed["KD"].startswith("1 x KL(p_s || m), m = 0.75 p_t + 0.25 p_s;")
    assert "forward KL only" in skewed["same in ModelOpt"]


def test_a_teacher_in_fp8_is_another_teacher():
    assert "FP8" not in card("--teacher-fp8-recipe", "tensorwise")["KD"]
    blockwise = card("--teacher-precision", "fp8", "--teacher-fp8-recipe", "blockwise")["KD"]
    assert blockwise.endswith("; p_t of layers in FP8 (E4M3, blockwise scales)")


@pytest.mark.parametrize("xtoken", [None, XTokenConfig()])
def test_settings_of_a_context_that_change_the_loss(xtoken):
    """Those that are set are named, alone and together."""

    def found(**settings) -> str:
        given = several({"context": ContextConfig(**settings), "xtoken": xtoken})
        return rows(loss_card(given, STUDENT, [TEACHER]))["KD"]

    plain = found()
    assert plain.endswith(", after a prompt of the teacher's own (context)")
    texts = {
        "skip_first": (2, ", without the first 2 tokens of each completion (skip_first)"),
        "missing": ("skip", ", without records that lack its context (missing)"),
        "success": (0.5, ", siblings have a reward of at least 0.5 (success)"),
    }
    for name, (value, text) in texts.items():
        assert found(**{name: value}) == plain + text
    every = found(**{name: value for name, (value, _) in texts.items()})
    assert every == plain + "".join(text for _, text in texts.values())
    assert found(user="{prompt} {x}", system="{y}", seq_length=64) == plain


def test_parts_that_do_not_exist_are_left_out():
    assert "CE" not in card("--kd-ratio", 1)
    plain = rows(loss_card(config("--kd-ratio", 0), STUDENT, []))
    assert plain["loss"] == "1 CE, nats per token" and plain.keys() == {"loss", "CE", "mask", "normaliser"}


def test_losses_of_experts():
    found = card("--moe-aux-loss-coeff", 1e-3, "--moe-z-loss-coeff", 1e-4)
    assert found["loss"] == "0.5 CE + 0.5 KD + balance + z, nats per token"
    assert found["balance"].startswith("0.001 x") and found["z"].startswith("0.0001 x")
    assert "by document" in found["same in other engines"]
    moved = card("--moe-router-bias-update-rate", 1e-3)
    assert "by 0.001 " in moved["expert bias"] and moved["loss"] == "0.5 CE + 0.5 KD, nats per token"


def test_vocabularies_of_two_sizes():
    found = card(teacher=replace(TEACHER, vocab_size=152064))
    assert (
        found["vocabulary"]
        == "student 151936 rows, teacher 152064: the first 151936, both softmaxes renormalised there"
    )
    assert found["same in other engines"] == "nothing: both models must have vocabularies of one size"


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("scaling", ["squared", "none"])
def test_equivalent_settings_give_the_same_loss(ratio, scaling):
    """For any CE and divergence, ModelOpt and Automodel get the same with the card's settings and factor."""
    temperature, ce, divergence = 3.0, 2.7, 0.31
    found = card("--kd-ratio", ratio, "--kd-temperature", temperature, "--kd-temperature-scaling", scaling)
    own = (1 - ratio) * ce + ratio * (temperature**2 if scaling == "squared" else 1) * divergence
    for engine, their_scale in (("ModelOpt", 1.0), ("NeMo Automodel", temperature**2)):
        text = found[f"same in {engine}"]
        share = float(re.search(r"(?:kd_loss_alpha|kd_ratio): ([\d.e-]+)", text)[1])
        factor = re.search(r"this loss is ([\d.e-]+) x", text)
        assert f"temperature: {temperature:g}" in text
        theirs = (1 - share) * ce + share * their_scale * divergence
        assert own == pytest.approx(theirs * (float(factor[1]) if factor else 1), rel=1e-5)


def test_rescaling_nothing_changes_nothing():
    assert rescaled(0.3, 4.0, 4.0) == (pytest.approx(0.3), pytest.approx(1.0))


def test_trl_has_no_cross_entropy_and_no_temperature():
    beta = {"forward_kl": 0, "reverse_kl": 1, "jsd": 0.5}
    for divergence, value in beta.items():
        text = card("--kd-ratio", 1, "--kd-divergence", divergence)["same in TRL GKD"]
        assert text.startswith(f"GKDConfig(lmbda=0, beta={value:g})")
    assert card()["same in TRL GKD"] == "nothing: it has no cross entropy"
    assert card("--kd-ratio", 1, "--kd-temperature", 2)["same in TRL GKD"] == "nothing: its loss is at T = 1"
    assert (
        card("--kd-ratio", 1, "--kd-divergence", "mixed_kl")["same in TRL GKD"]
        == "nothing: it has no mixed_kl"
    )
    assert "forward KL only" in card("--kd-divergence", "jsd")["same in ModelOpt"]


def test_several_teachers_have_a_line_each():
    own = dict(name="own", xtoken=XTokenConfig(loss="uld"))
    settings = several(dict(name="big", weight=3.0, temperature=2.0), own, teacher_weighting="ce")
    found = rows(loss_card(settings, STUDENT, [TEACHER, replace(TEACHER, vocab_size=32000)]))
    assert (
        found["KD"] == "sum of weight x KD of each teacher, weights in each pack softmax(ln weight - ce / 1)"
    )
    assert found["KD big"].startswith("weight 0.75: 4 x KL(p_t || p_s)")
    assert found["KD own"].startswith("weight 0.25: 1 x sum |sorted p_t - sorted p_s|")
    assert "32000 rows of another tokenizer" in found["vocabulary own"] and "chunks" in found["normaliser"]
    assert found["same in other engines"] == "nothing: one teacher only"
    assert not found.keys() & {"same in TRL GKD", "vocabulary"}


def test_what_teachers_have_in_common_is_said_once():
    names = dict(name="a"), dict(name="b")
    found = rows(loss_card(several(*names), STUDENT, [TEACHER, TEACHER]))
    assert found["vocabulary"] == "all 151936 rows of both models" and not [
        label for label in found if "vocabulary " in label
    ]
    assert found["KD a"] == found["KD b"]
    differ = rows(loss_card(several(*names), STUDENT, [TEACHER, replace(TEACHER, vocab_size=152064)]))
    assert "vocabulary" not in differ and differ["vocabulary a"] != differ["vocabulary b"]


@pytest.mark.parametrize("loss", XTOKEN_LOSSES)
def test_every_loss_between_tokenizers_has_words(loss):
    found = card("--xtoken-loss", loss)
    assert "per aligned chunk of text" in found["KD"] or loss == "uld"
    assert found["KD"].endswith("T = 1 (T^2)")


def test_rollouts():
    on = ("--on-policy-fraction", 1, "--prompt-data-path", "p.jsonl", "--kd-ratio", 1)
    found = card(*on, "--kd-divergence", "reverse_kl", "--rollout-truncated", "drop")
    assert found["rollouts"].startswith(
        "completions sampled from p_s in every step, up to 256 tokens; truncated"
    )
    assert found["same in TRL GKD"].startswith("GKDConfig(lmbda=1, beta=1)")
    assert "same in ModelOpt" not in found
    assert "p_s at T = 0.8" in card(*on, "--rollout-temperature", 0.8)["rollouts"]
    assert "rollouts" not in card()
