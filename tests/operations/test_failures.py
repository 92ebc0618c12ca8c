"""If one rank raises or dies, the others end within seconds, and only its traceback is printed."""

from __future__ import annotations

import json

import pytest

from tests.train.command import flags, make_files
from tests.train.processes import run_processes


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("failures"))


@pytest.mark.parametrize("point", ["in_optimizer", pytest.param("in_data", marks=pytest.mark.slow)])
@pytest.mark.fault(18)
def test_a_rank_that_raises_is_the_one_that_is_shown(point, files, tmp_path):
    argv = flags(files, f"raises {point}", "--train-iters", 400)
    first, second = run_processes(tmp_path, argv, 2, fault=f"error@{point}:1:3")
    assert (first.code, second.code) == (1, 1) and max(first.after_s, second.after_s) < 10
    assert "Traceback" in second.output and second.output.endswith(
        f"rank 1 failed first: RuntimeError: error@{point}:1:3\n"
    )
    assert "Traceback" not in first.output
    report = files / f"raises {point}" / "errors" / "rank_1.txt"
    line = f"rank 0: stopped because rank 1 failed: RuntimeError: error@{point}:1:3\n  see {report}\n"
    assert first.output.endswith(line)
    header, *traceback = report.read_text().splitlines()
    header = json.loads(header)
    assert (header["rank"], header["exit_code"]) == (1, 1) and traceback[0].startswith("Traceback")
    assert not (report.parent / "rank_0.txt").exists()


@pytest.mark.parametrize("kind", ["kill", pytest.param("exit", marks=pytest.mark.slow)])
@pytest.mark.fault(18)
def test_a_rank_that_ends_without_a_word(kind, files, tmp_path):
    argv = flags(files, kind, "--train-iters", 400)
    first, second = run_processes(tmp_path, argv, 2, fault=f"{kind}@in_step:1:3")
    assert (first.code, second.code) == (1, 1 if kind == "exit" else -9) and first.after_s < 10
    assert first.output.endswith(
        "rank 0: lost contact with the other ranks, and none has said why: one was killed or hangs\n"
    )


def test_errors_of_communication_are_told_from_others():
    import torch.distributed as dist

    from mkd.errors import CheckpointError
    from mkd.operations.failures import is_communication_error

    def wrapped(cause):
        try:
            raise CheckpointError("cannot be loaded", code="example") from cause
        except CheckpointError as error:
            return error

    gloo = RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
    )
    for error in (gloo, dist.DistBackendError("NCCL error"), dist.DistNetworkError("x"), wrapped(gloo)):
        assert is_communication_error(error)
    own_gpu = dist.DistBackendError("NCCL error\nFailed to CUDA calloc async 24 bytes")
    others = RuntimeError("mat1 and mat2"), OSError("Broken pipe"), wrapped(RuntimeError("bad"))
    for error in (*others, own_gpu, wrapped(own_gpu)):
        assert not is_communication_error(error)


@pytest.mark.parametrize("is_over", [True, False])
def test_a_run_of_one_process_has_no_others_to_lose(is_over, tmp_path, capsys, monkeypatch):
    import torch.distributed as dist

    from mkd.operations.failures import FailureReports, end_of_rank
    from mkd.operations.launch.rendezvous import Rendezvous

    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    reports, rendezvous = FailureReports(0, 1, tmp_path), Rendezvous(0, 1)
    rendezvous.is_over = is_over
    assert end_of_rank(dist.DistBackendError("NCCL error"), reports, rendezvous) == 1
    assert capsys.readouterr().err.endswith("rank 0 failed first: DistBackendError: NCCL error\n")


def test_reports_of_other_runs_are_not_believed(tmp_path):
    from mkd.operations.failures import FailureReports

    first, second = (FailureReports(rank, 2, tmp_path, run="now") for rank in range(2))
    FailureReports(1, 2, tmp_path, run="earlier").write("old", "")
    assert first.of_peers() == []
    second.write("new", "why\n", exit_code=65)
    (failure,) = first.of_peers()
    assert (failure.rank, failure.what, failure.exit_code) == (1, "new", 65) and second.of_peers() == []


def test_the_report_of_torchrun_ends_with_the_error(tmp_path, monkeypatch, capsys):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from mkd.errors import UsageError
    from mkd.operations.failures import FailureReports, end_of_rank
    from mkd.operations.launch.rendezvous import Rendezvous
    from mkd.torchrun_report import ERROR_FILE

    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    for text in ("first", "second"):  # what ends the process is its first error
        error = UsageError(text, "why", "do", code="example")
        assert end_of_rank(error, FailureReports(0, 1), Rendezvous(0, 1)) == 64
    assert capsys.readouterr().err.startswith("error[example]: first\n")
    report = str(ChildFailedError("pretrain_kd.py", {0: ProcessFailure(0, 1, 64, str(path))}))
    cause = "traceback : error[example]: first\n    why: why\n    do:  do"
    assert report.rstrip("=\n").endswith(cause)
