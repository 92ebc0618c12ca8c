"""Fixes that errors offer are followed: an added setting has an effect, and nothing refuses it next."""

from __future__ import annotations

import re

import pytest

from mkd.config.load import load_config
from mkd.errors import MkdError
from tests.plan.checks.test_problems import shape
from tests.run_facts import problems_of

COMMON = "--student-hf s --train-iters 10 --seq-length 512 --global-batch-size 8"
STORED, OWN = f"{COMMON} --data-path d.jsonl", f"{COMMON} --on-policy-fraction 1 --prompt-data-path p.jsonl"
RUNS = {
    "a teacher": f"{STORED} --teacher-hf t",
    "no teacher": f"{STORED} --kd-ratio 0",
    "pairs": f"{STORED} --teacher-hf t --dpo-beta 0.1 --kd-ratio 0",
    "own text": f"{OWN} --teacher-hf t --kd-ratio 1",
    "rewards": f"{OWN} --kd-ratio 0 --reward m:f --samples-per-prompt 4",
    "adapters": f"{STORED} --teacher-hf t --lora-rank 4",
    "rounded": f"{STORED} --teacher-hf t --bf16 --student-rounding int8",
    "stored top-k": f"{STORED} --teacher-topk k",
    "stored states": f"{STORED} --teacher-hidden k",
    "an average": f"{STORED} --self-teacher ema",
    "two stages": f"{STORED} --teacher-hf t --pipeline-model-parallel-size 2",
}
SETTINGS = """
--teacher-peers 2|--teacher-fp8-recipe blockwise|--teacher-ahead 3|--xtoken-top-k 5|--teacher-prefetch 2
--kd-jsd-beta 0.3|--kd-skew-alpha 0.2|--kd-mixed-kl-weight 0.3|--tag-key d|--tag-weights a=1
--data-tags d.jsonl=a|--teacher-weighting-temperature 2|--kd-fp32-logits|--recompute-method uniform
--recompute-num-layers 2|--recompute-modules moe|--eval-multiple-choice m.jsonl|--eval-num-fewshot 2
--prompt-data-path q|--rollout-prompts 3|--samples-per-prompt 2|--max-new-tokens 80
--rollout-temperature 0.5|--rollout-source server|--rollout-source records|--rollout-records r
--rollout-server-url http://127.0.0.1:1|--max-staleness 1|--max-staleness 2|--rollout-truncated drop
--simpo-gamma 2|--reward-timeout-s 3|--clip-range 0.3|--rollout-updates 2|--lora-alpha 3|--lora-targets qkv
--rounding-exclude *.o_proj|--round-activations|--calibration-batches 3|--wandb-entity e|--profile-steps 1 2
--profile-ranks 0|--student-fp8-recipe tensorwise|--accept-change x|--weight-key w
"""
EXAMPLES = {"N": "2", "FILE": "f.jsonl", "DIR": "d", "module:function": "m:f"}
BARE = {  # flags that an error names without a value
    "--lora-rank": "4",
    "--student-rounding": "int8",
    "--wandb-project": "p",
    "--simpo-beta": "2",
    "--teacher-peers": "2",
}
REFUSES = re.compile(r"remove-flag|exclude|not-possible|value-not-valid|command-line|unknown")


def problems(words: list[str], world_size: int = 1) -> list[MkdError]:
    try:
        return problems_of(load_config(words).config, world_size, shape())
    except MkdError as error:
        return getattr(error, "errors", [error])


def offered(do: str) -> list[str]:
    """Return the words that a fix adds to the command line."""
    added = re.match(r"(?:add|give) (.*?)(?:, or remove (?:it|them)|$)", do)
    words: list[str] = []
    for word in added[1].split(" ") if added else ():
        if word in ("or", "in"):  # one of two values, or in place of others
            break
        words.append(EXAMPLES.get(word, word))
        if word in BARE:
            words.append(BARE[word])
    return words


def without(argv: list[str], do: str) -> list[str]:
    """Return the command line without the flags in whose place a fix adds others."""
    gone = re.search(r"in place of ((?:--\S+ ?)+)", do.replace(",", ""))
    words = list(argv)
    for flag in gone[1].split() if gone else ():
        place = words.index(flag)
        del words[place : place + 2]
    return words


@pytest.mark.parametrize("run", RUNS)
def test_a_setting_without_effect_gets_one_or_is_to_be_removed(run):
    """No offered flag leaves the error as it is, and none is refused by another error."""
    tried = 0
    for setting in SETTINGS.replace("\n", "|").strip("|").split("|"):
        argv = [*RUNS[run].split(), *setting.split()]
        before = problems(argv)
        for error in (one for one in before if one.code == "remove-flag"):
            more = offered(error.do)
            if not more:
                assert "remove" in error.do, f"{setting}: {error.report()}"
                continue
            tried += 1
            after = problems([*without(argv, error.do), *more])
            old = {(one.code, one.what) for one in before}
            assert (error.code, error.what) not in {(one.code, one.what) for one in after}, (setting, more)
            fresh = [one for one in after if (one.code, one.what) not in old and REFUSES.search(one.code)]
            assert not fresh, f"{setting}, then {' '.join(more)}: {[one.report() for one in fresh]}"
    assert tried > 3
