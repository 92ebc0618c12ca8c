"""Check the table of cross-tokenizer teachers: one process is the reference for every layout."""

from __future__ import annotations

import json

import pytest

from tests.tiny_models import make_model
from tests.train.cross_tokenizer_invariance import BY_ENTROPY, LAYOUTS, SELECT, SINGLE, make_files, run_layout
from tests.train.invariance import SP, Layout, errors_of, require_equal
from tests.xtoken.small_tokenizers import train_byte_level

UPDATES = 2  # the table has more
MIXED = [
    layout
    for layout in LAYOUTS
    if layout.name in ("TP2 CP2 + sequence parallel, micro-batch 4", "PP2 VPP2, micro-batch 2")
]
WEIGHING = (
    Layout("TP2 + sequence parallel, micro-batch 4", 2, tp=2, micro=4, flags=SP),
    Layout("CP2, micro-batch 2", 2, cp=2, micro=2),
)
# These repeat parts of other cases, or need 8 processes.
SLOW = {"TP2 + sequence parallel", "TP4, micro-batch 2", "PP2", "CP2", "PP2 CP2", "TP2 PP2 DP2"}


def is_slow(loss, flags, layout):
    """Return True if other cases cover the parts: each loss and each weighting keeps one layout."""
    others = (
        loss in ("p_kl", "prefix_kl")
        or (flags == BY_ENTROPY and layout.cp > 1)
        or (flags == SELECT and layout.tp > 1)
    )
    return layout.name in SLOW or (layout.pp > 1 and loss != "partition_kl") or others


CASES = (
    *(("partition_kl", (), layout) for layout in LAYOUTS),
    *((loss, (), layout) for loss in ("prefix_kl", "p_kl", "gold") for layout in MIXED),
    *(("equal_weights", SELECT, layout) for layout in WEIGHING),
    *(("partition_kl", BY_ENTROPY, layout) for layout in WEIGHING),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_files(tmp_path_factory.mktemp("cross_tokenizer"))
    settings = json.loads((folder / "partition_kl.yaml").read_text())
    for teacher in settings["teachers"]:
        teacher.pop("weight", None)  # a selected teacher has all the weight
    # It is so confident that its cross entropy is the lower one in three packs of eight.
    make_model(
        folder / "loud", "llama", seed=2, vocab_size=460, hidden_size=72, tie_word_embeddings=True, scale=9.0
    )
    train_byte_level(vocab_size=450).save_pretrained(folder / "loud")
    settings["teachers"][0]["hf"] = str(folder / "loud")
    (folder / "equal_weights.yaml").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def single(folder, ranks):
    """Return results of one process by loss and flags; its exports are those of the last request."""
    cached = {}

    def run(loss, flags):
        if (loss, flags) not in cached:
            cached.clear()
            layout = SINGLE.with_flags(flags)
            (cached[loss, flags],) = ranks.run(
                run_layout, 1, layout, folder, loss, folder / "single", UPDATES
            )
        return cached[loss, flags]

    return run


@pytest.mark.parametrize(
    "loss, flags, layout",
    [
        pytest.param(
            loss,
            flags,
            layout,
            id=f"{loss} {' '.join(flags[1:2])} {layout.name}",
            marks=pytest.mark.slow if is_slow(loss, flags, layout) else [],
        )
        for loss, flags, layout in CASES
    ],
)
def test_layout_equals_one_process(loss, flags, layout, folder, single, ranks):
    reference = single(loss, flags)
    results = ranks.run(
        run_layout, layout.ranks, layout.with_flags(flags), folder, loss, folder / "layout", UPDATES
    )
    require_equal(errors_of(results, folder, reference))


def test_soft_capped_logits_at_a_layout(ranks, tmp_path):
    """A teacher with another tokenizer and a cap: its cap changes the loss, alike on two processes."""
    folder, losses = make_files(tmp_path, families=("qwen3", "gemma4", "qwen2")), []
    path = folder / "cross" / "config.json"
    written = json.loads(path.read_text())
    assert written["final_logit_softcapping"]
    for cap in (written["final_logit_softcapping"], 0.01):
        path.write_text(json.dumps(written | {"final_logit_softcapping": cap}))
        (single,) = ranks.run(run_layout, 1, SINGLE, folder, "partition_kl", folder / "single", 1)
        losses.append(single["sums"]["kd"])
    layout = Layout("TP2 + sequence parallel", 2, tp=2, flags=SP)
    results = ranks.run(run_layout, 2, layout, folder, "partition_kl", folder / "layout", 1)
    require_equal(errors_of(results, folder, single))
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[0]
