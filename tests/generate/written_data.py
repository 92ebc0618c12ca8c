"""Prompts for a tiny teacher, and `mkd generate` on a rank of the pool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron.core import parallel_state

from tests.chat.small_pair import TEXT, make_chat_model, run_command

RECORDS = (
    {"prompt": TEXT, "answer": 3, "tag": "text"},
    {"messages": [{"role": "user", "content": "Questions"}], "answer": 1},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "not asked for"},
        ],
        "answer": 2,
        "chosen": "a good answer",
    },
    {"prompt": "Hello", "answer": 4},
)


def make_teacher(folder: Path) -> Path:
    """Make a teacher, a student of another family, and prompts."""
    write_ascii(make_chat_model(folder / "teacher", "qwen3", seed=1))
    make_chat_model(folder / "student", num_hidden_layers=2)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RECORDS))
    return folder


def write_ascii(model: Path) -> None:
    """Give tokens with other bytes ASCII names: a random model would write hardly any text that is UTF-8."""
    path = model / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    kept = {chr(byte) for byte in range(33, 127)} | {"\u0120", "\u010a"}  # with space and newline
    bpe = content["model"]
    bpe["vocab"] = {
        name if set(name) <= kept or name.startswith("<|") else f"~{one}": one
        for name, one in bpe["vocab"].items()
    }
    pairs = [one.split(" ") if isinstance(one, str) else one for one in bpe["merges"]]
    bpe["merges"] = [one for one in pairs if set("".join(one)) <= kept]
    path.write_text(json.dumps(content), encoding="utf-8")


def arguments(folder: Path, out: str, *more: object) -> list[object]:
    """Return the command line of a job that keeps all completions."""
    argv: list[object] = ["--teacher", folder / "teacher", "--prompts", folder / "prompts.jsonl"]
    return [*argv, "--out", folder / out, "--max-new-tokens", 12, "--truncated", "keep", *more]


def generated(folder: Path, out: str, *more: object) -> tuple[int, str, str, bytes]:
    """Run `mkd generate` on this rank; return (exit code, stdout, stderr, output)."""
    code, stdout, stderr = run_command("generate", arguments(folder, out, *more))
    parallel_state.destroy_model_parallel()  # which a process that fails leaves as they are
    path = folder / out
    return code, stdout, stderr, path.read_bytes() if path.exists() else b""


def torn(folder: Path, out: str, lines: int, *more: object) -> tuple[int, str, str, bytes]:
    """Run it, and end it as a kill does: in the middle of the line that follows `lines` whole ones."""
    from mkd.generate.journal import Journal

    write = Journal.add

    def add(journal: Journal, completion: object) -> None:
        journal.lines = getattr(journal, "lines", 0) + 1
        if journal.lines > lines:
            journal._file.write(b"0123456789abcdef {")
            journal._file.flush()
            raise KeyboardInterrupt
        write(journal, completion)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "add", add)
        return generated(folder, out, *more)


def records_in(data: bytes) -> list[dict]:
    """Return the records of an output."""
    return [json.loads(line) for line in data.decode().splitlines()]


def without_logp(data: bytes) -> list[dict]:
    """Return the records without ln p, whose last digit depends on the batch."""
    return [{**one, "generated": {**one["generated"], "logp": 0}} for one in records_in(data)]
