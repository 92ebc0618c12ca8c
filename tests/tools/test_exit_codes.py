"""Check that tools end as `pretrain_kd.py` does: a user's error is one message on stderr and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mkd.errors import EXIT_DATA, EXIT_USAGE, DataError, ErrorList, returns_exit_code

ROOT = Path(__file__).resolve().parent.parent.parent
FOR_DEVELOPERS = {"fetch_smollm2.py", "make_docs.py", "record_checks.py", "system_constraints.py"}
TOOLS = [path for path in sorted((ROOT / "tools").glob("*.py")) if path.name not in FOR_DEVELOPERS]


@pytest.mark.parametrize(
    "tool", [*TOOLS, ROOT / "launch" / "submit.py", ROOT / "pretrain_kd.py"], ids=lambda path: path.stem
)
def test_a_wrong_flag_is_a_usage_error(tool):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tool), "--no-such-flag", "x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert result.returncode == EXIT_USAGE, result.stdout + result.stderr
    assert result.stderr.startswith("error[") and "Traceback" not in result.stderr


REPORT = "error[example]: no text\n  do:  give some\n"


@pytest.mark.parametrize("rank", ["", "0", "1"])
def test_rank_0_speaks_for_all_and_others_for_themselves(rank, monkeypatch, capsys):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, rank) if rank else monkeypatch.delenv(name, raising=False)
    own = DataError("no text", "", "give some", code="example")

    @returns_exit_code
    def main(error):
        if error:
            raise error

    assert main(None) == 0 and capsys.readouterr().err == ""
    assert main(own) == EXIT_DATA
    assert capsys.readouterr().err == ("rank 1: " if rank == "1" else "") + REPORT
    assert main(ErrorList([own])) == EXIT_DATA
    assert capsys.readouterr().err == ("" if rank == "1" else REPORT)
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # only this process reports
    assert main(ErrorList([own])) == EXIT_DATA
    assert capsys.readouterr().err == REPORT


def test_ctrl_c_ends_a_tool_without_a_traceback(capsys):
    @returns_exit_code
    def main():
        raise KeyboardInterrupt

    assert main() == 130 and capsys.readouterr().err == "interrupted\n"
