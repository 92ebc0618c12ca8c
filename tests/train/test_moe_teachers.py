"""Check models with experts among several teachers and tokenizers: a layout equals one process."""

from __future__ import annotations

import json

import pytest

from tests.train.cross_tokenizer_invariance import SINGLE, make_files, run_layout
from tests.train.invariance import DISTRIBUTED, SP, Layout, errors_of, require_equal
from tests.train.moe_invariance import EP2

UPDATES = 1
WITH_EXPERTS = ("qwen3_moe", "mixtral", "qwen2")  # student, cross-tokenizer teacher, the other teacher
DENSE_STUDENT = ("qwen3", "llama", "qwen3_moe")
CASES = {
    "student and cross-tokenizer teacher, EP2 TP2 + SP": (
        *(WITH_EXPERTS, "partition_kl"),
        Layout("", 2, tp=2, micro=2, flags=EP2 + SP),
    ),
    "student and cross-tokenizer teacher, EP2 PP2 VPP2": (
        *(WITH_EXPERTS, "gold"),
        Layout("", 4, pp=2, vp=2, micro=2, flags=EP2),
    ),
    "student and cross-tokenizer teacher, EP2 CP2 DP2": (
        *(WITH_EXPERTS, "prefix_kl"),
        Layout("", 4, cp=2, flags=EP2 + DISTRIBUTED),
    ),
    "one teacher of two, EP2": (DENSE_STUDENT, "partition_kl", Layout("", 2, flags=DISTRIBUTED)),
}
QUICK = {name for name in CASES if name.endswith(("TP2 + SP", "EP2"))}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in CASES]
)
def test_layout_equals_one_process(name, tmp_path, ranks):
    families, loss, layout = CASES[name]
    folder = make_files(tmp_path, families=families)
    settings = json.loads((folder / f"{loss}.yaml").read_text())
    if families == DENSE_STUDENT:
        settings["teachers"][1]["expert_model_parallel_size"] = 2
    (folder / "spread.yaml").write_text(json.dumps(settings))
    (single,) = ranks.run(run_layout, 1, SINGLE, folder, loss, folder / "single", UPDATES)
    results = ranks.run(run_layout, layout.ranks, layout, folder, "spread", folder / "layout", UPDATES)
    require_equal(errors_of(results, folder, single))
