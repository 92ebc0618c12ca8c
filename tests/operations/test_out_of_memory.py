"""The out-of-memory error: planned and actual memory, and settings to change."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from tests.reported import reported_text
from tests.train.command import flags, make_files, with_fault

TORCH_TEXT = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. "
    "GPU 0 has a total capacity of 2.00 GiB of which 17 MiB is free."
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("memory"))


def planned(files, *more, world_size=1):
    from mkd.config.load import load_config
    from mkd.run.plan_run import plan_run

    return plan_run(load_config(flags(files, "oom", "--micro-batch-size", "2", *more)).config, world_size)


def explained(files, device, *more, rank=0, world_size=1, text=TORCH_TEXT) -> str:
    from mkd.errors import OutOfMemory
    from mkd.operations.out_of_memory import explain

    plan = planned(files, *more, world_size=world_size)
    try:
        raise torch.OutOfMemoryError(text)
    except torch.OutOfMemoryError as error:
        found = explain(error, plan.forecast, rank, world_size, device)
    assert isinstance(found, OutOfMemory) and found.exit_code == 1
    return str(found)


def test_planned_and_actual_memory_and_three_changes(files):
    from mkd.operations.out_of_memory import DeviceMemory

    device = DeviceMemory(total=2.0, free=0.05, allocated=1.2, peak=1.4, reserved=1.5)
    message = explained(files, device)
    assert message.startswith(
        "GPU memory is not enough on rank 0 when it asked for 0.50 GiB more\n  why: planned for "
    )
    assert "student 0.00 + gradients 0.00 + optimizer 0.00 + teacher 0.00" in message
    assert "in use: tensors have 1.20 GiB (at most 1.40), torch's allocator holds 0.30 more" in message
    assert "CUDA, NCCL and other processes 0.45, 0.05 of 2.0 are free" in message
    assert "expandable_segments:True" in message  # 0.3 of 2 GiB are fragments


def test_the_changes_make_the_plan_smaller(files, monkeypatch):
    message = explained(files, None, "--seq-length", "32768", text="no numbers")
    assert message.startswith("GPU memory is not enough on rank 0\n") and "in use" not in message
    (planned,) = re.findall(r"planned for pipeline rank 0: ([\d.]+) GiB", message)
    changes = re.findall(r"  (\d)\. (--[^:]+): [\d.]+ ms, ([\d.]+) GiB", message)
    assert [number for number, _, _ in changes] == ["1", "2", "3"] and all(
        float(need) < float(planned) for *_, need in changes
    )
    assert "(times" not in message
    pipelines = (
        "--pipeline-model-parallel-size",
        "2",
        "--teacher-pipeline-layout",
        "2,1",
        "--seq-length",
        "131072",
    )
    monkeypatch.setattr("mkd.plan.advice.verdict.QUICKLY_COMPARED", 0)
    assert "  (times without teachers ahead)" in explained(files, None, *pipelines, world_size=2)


def test_the_pipeline_rank_of_a_rank(files):
    layout = ("--pipeline-model-parallel-size", "2", "--teacher-pipeline-layout", "2,1")
    for rank, stage in ((0, 0), (1, 0), (2, 1), (3, 1)):
        assert f"planned for pipeline rank {stage}: " in explained(
            files, None, *layout, rank=rank, world_size=4
        )


def nccl_error(text):
    return dist.DistBackendError(
        f"NCCL error in: NCCLUtils.cpp:93, unhandled cuda error\nLast error:\n{text}"
    )


@pytest.mark.parametrize(
    "text, free, wanted",
    [
        ("Failed to CUDA calloc async 24 bytes", 0.01, "0.00"),
        ("Failed to CUDA calloc 536870912 bytes", 0.45, "0.50"),
        ("Failed to CUDA malloc 536870912 bytes", 0.45, "0.50"),
    ],
)
def test_memory_that_nccl_does_not_get(text, free, wanted, files, monkeypatch):
    from mkd.errors import OutOfMemory
    from mkd.operations.failures import is_communication_error
    from mkd.operations.out_of_memory import DeviceMemory, memory_explained

    device = DeviceMemory(total=8.0, free=free, allocated=0.5, peak=0.6, reserved=0.7)
    monkeypatch.setattr(DeviceMemory, "now", lambda: device)
    with pytest.raises(OutOfMemory) as raised, memory_explained(planned(files).forecast, 0, 2):
        raise nccl_error(text)
    message = str(raised.value)
    assert f"when it asked for {wanted} GiB more" in message and f"{free} of 8.0 are free" in message
    assert "end them" in message  # 6.85 GiB or more are not of torch
    assert raised.value.__cause__ is not None and not is_communication_error(raised.value)


@pytest.mark.parametrize("text, free", [("Failed to CUDA calloc 24 bytes", 1.0), ("remote exited", 0.01)])
@pytest.mark.parametrize("answers", [True, False])
def test_other_errors_of_nccl(text, free, answers, files, monkeypatch):
    from mkd.operations.out_of_memory import DeviceMemory, memory_explained

    def now():
        if not answers:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return DeviceMemory(total=4.0, free=free, allocated=0.5, peak=0.6, reserved=0.7)

    monkeypatch.setattr(DeviceMemory, "now", now)
    with pytest.raises(dist.DistBackendError, match=text), memory_explained(planned(files).forecast, 0, 2):
        raise nccl_error(text)


def test_the_command_explains_torchs_error(files, ranks):
    ((exit_code, _, stderr),) = ranks.run(with_fault, 1, flags(files, "command"), "oom@in_step:0:2")
    error = reported_text(stderr)
    assert exit_code == 1 and error.startswith(
        "GPU memory is not enough on rank 0 when it asked for 2.00 GiB more\n"
    )
    assert "  do:  one of these" in error and "Traceback" not in error
