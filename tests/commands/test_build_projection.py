"""Run `mkd projection` as a person does."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mkd.commands import projection
from mkd.commands.projection import main
from mkd.errors import EXIT_DATA, EXIT_DONE, EXIT_USAGE
from mkd.tokenizers.load import open_tokenizer
from mkd.xtoken import build_projection
from mkd.xtoken.vocabulary.relation import STAGES, ProjectionSettings
from tests.xtoken.conftest import tokenizer_paths  # noqa: F401
from tests.xtoken.small_tokenizers import SAMPLE, SOURCE, train_byte_level, train_sentence_piece

TOOL = Path(__file__).resolve().parents[2] / "tools" / "build_projection.py"


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> tuple[str, str]:
    """Return a folder with a byte-level tokenizer, and a SentencePiece file."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_byte_level().save_pretrained(folder / "hf")
    (folder / "teacher.model").write_bytes(train_sentence_piece())
    return str(folder / "hf"), str(folder / "teacher.model")


def figures_of(output: str) -> tuple[float, float]:
    """Return (seconds, GiB) as printed by the tool."""
    found = re.search(r"built in ([\d.]+) s, peak memory ([\d.]+) GiB", output)
    return float(found[1]), float(found[2])


def test_a_relation_is_written_and_audited(paths, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": SOURCE}) + "\n" + json.dumps({"text": SAMPLE}) + "\n"
    )
    output = tmp_path / "out" / "relation.npz"
    command = [sys.executable, TOOL, "--student", paths[0], "--teacher", paths[1], "--output", output]
    command += ["--audit-data", tmp_path / "a.jsonl"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert result.returncode == EXIT_DONE, result.stderr
    figures = json.loads((tmp_path / "out" / "relation.audit.json").read_text())
    student, teacher = map(open_tokenizer, paths)
    relation = build_projection(student, teacher, projection=output)
    assert figures["common"] == len(relation.common_student)
    assert figures["rows"] + figures["empty_rows"] == student.vocab_size
    assert figures["empty_row_ids"] == relation.projection.empty_rows.tolist()
    assert f"common tokens: {figures['common']}, " in result.stdout and "2 texts, " in result.stdout
    assert figures["audit"]["num_bytes"] == len(SOURCE.encode()) + len(SAMPLE.encode())
    assert sum(figures["audit"]["bytes"].values()) == pytest.approx(1)
    assert figures_of(result.stdout)[0] == pytest.approx(figures["build_time_s"], abs=0.1)


def test_stages_and_published_matrices(paths, tmp_path, capsys):
    common = ["--student", paths[0], "--teacher", paths[1]]
    assert main([*common, "--stages", "exact,special"]) == EXIT_DONE
    exact = capsys.readouterr().out
    assert main(common) == EXIT_DONE
    rows = [int(re.search(r"(\d+) rows with support", text)[1]) for text in (exact, capsys.readouterr().out)]
    assert 0 < rows[0] < rows[1]
    np.savez(tmp_path / "m.npz", indices=np.full((900, 1), 7), likelihoods=np.ones((900, 1)))
    assert main([*common, "--projection", str(tmp_path / "m.npz")]) == EXIT_DONE
    assert "900 rows with support, 900 entries" in capsys.readouterr().out


def test_defaults_are_those_of_the_relation():
    assert projection.STAGES == STAGES
    assert ProjectionSettings().top_k == projection.TOP_K


def test_messages_are_texts(paths, tmp_path, capsys):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    records = [{"messages": turns}, {"prompt": "1 + 1 =", "completion": " 2"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ["--audit-data", str(tmp_path / "a.jsonl"), "--audit-output", str(tmp_path / "a.json")]
    assert main(["--student", paths[0], "--teacher", paths[1], *options]) == EXIT_DONE
    assert "4 texts, 17 bytes" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["audit"]["num_texts"] == 4


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (("--stages", "exact,fuzzy"), EXIT_USAGE, "--stages exact,fuzzy makes no projection matrix\n  why: "),
        (("--top-k", "0"), EXIT_USAGE, "--top-k 0 leaves no entry"),
        (("--projection", "missing.npz"), EXIT_USAGE, "projection missing.npz is not a file"),
        (("--teacher", "."), EXIT_USAGE, ". holds no tokenizer"),
        (("--audit-data", "missing.jsonl"), EXIT_DATA, "missing.jsonl: nothing found"),
    ],
)
def test_errors_have_their_exit_codes(paths, tmp_path, monkeypatch, capsys, options, exit_code, message):
    monkeypatch.chdir(tmp_path)
    assert main(["--student", paths[0], "--teacher", paths[1], *options]) == exit_code
    assert message in capsys.readouterr().err


def test_bad_and_missing_records_are_named(paths, tmp_path, capsys):
    common = ["--student", paths[0], "--teacher", paths[1], "--audit-data"]
    (tmp_path / "bad.jsonl").write_text('{"text": "ok"}\n{"text": 1}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    assert (
        main([*common, str(tmp_path / "bad.jsonl")])
        == main([*common, str(tmp_path / "empty.jsonl")])
        == EXIT_DATA
    )
    errors = capsys.readouterr().err
    assert "bad.jsonl:2: text is a number" in errors and "empty.jsonl holds no record" in errors


@pytest.mark.slow
@pytest.mark.download
def test_real_vocabularies_take_seconds_and_little_memory(tokenizer_paths):  # noqa: F811
    command = [
        sys.executable,
        TOOL,
        "--student",
        tokenizer_paths["qwen3"],
        "--teacher",
        tokenizer_paths["mistral"],
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == EXIT_DONE, result.stderr
    # CPU time of one core, independent of other load
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= 60
    assert figures_of(result.stdout)[1] <= 2
