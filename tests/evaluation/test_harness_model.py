"""Score requests of lm-evaluation-harness with mkd and with the harness's own adapter: the same figures."""

from __future__ import annotations

import math

import pytest

from mkd.errors import UsageError
from mkd.evaluation.harness_model import model_class
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import run_main

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness")
PAIRS = (
    ("the quick brown", " fox"),
    ("the quick brown ", "dog jumps over"),
    ("", "the lazy dog"),
    ("the lazy dog jumps", " over the quick brown fox. the"),
)
TEXTS = ("the quick brown fox jumps over the lazy dog. " * 4, "the")
OPTIONS = dict(device="cpu", batch_size=3)


def figures(adapter, folder, **more):
    """Return log-likelihoods, whether they are greedy, and rolling ones, on a rank of the pool."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    dtype = "fp32" if adapter == "mkd" else "float32"
    model = (model_class() if adapter == "mkd" else HFLM)(str(folder), dtype=dtype, **OPTIONS, **more)

    def ask(kind, values):
        return [Instance(kind, {}, value, number) for number, value in enumerate(values)]

    pairs = model.loglikelihood(ask("loglikelihood", PAIRS), disable_tqdm=True)
    rolling = model.loglikelihood_rolling(
        ask("loglikelihood_rolling", [(text,) for text in TEXTS]), disable_tqdm=True
    )
    if adapter == "mkd":
        with pytest.raises(UsageError):
            model.generate_until(ask("generate_until", [("the", {"until": ["."], "max_gen_toks": 2})]))
    return [float(value) for value, _ in pairs], [bool(one) for _, one in pairs], [*map(float, rolling)]


def figures_of(adapter, folder, more):
    return figures(adapter, folder, **more)


@pytest.mark.parametrize("family, more", [("qwen3", {"max_length": 24}), ("gemma3", {})])
def test_figures_are_those_of_the_adapter_of_transformers(family, more, tmp_path, ranks):
    folder = add_tokenizer(make_model(tmp_path, family))
    ((values, greedy, rolling),) = ranks.run(figures_of, 1, "mkd", folder, more)
    words = ["--hf", str(folder), "--save", str(tmp_path / "checkpoint")]
    assert run_main(ranks, words, command="mkd.commands.convert")[0].exit_code == 0
    loaded = ranks.run(figures_of, 1, "mkd", folder, more | {"load": str(tmp_path / "checkpoint")})
    assert loaded == [(values, greedy, rolling)]
    ((expected, expected_greedy, expected_rolling),) = ranks.run(figures_of, 1, "hf", folder, more)
    assert greedy == expected_greedy and all(value < -1 for value in values)
    for ours, theirs in zip([*values, *rolling], [*expected, *expected_rolling], strict=True):
        assert math.isclose(ours, theirs, rel_tol=2e-6)
