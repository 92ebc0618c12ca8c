"""The Triton passes against plain torch in float64, and the chunk loss of a GPU against that of the CPU."""

from __future__ import annotations

from operator import methodcaller
from types import SimpleNamespace

import pytest
import torch

from mkd.losses import HeadInput
from mkd.losses.softmax import LOWEST
from mkd.parallel.tensor_records import map_tensors
from mkd.xtoken import chunk_torch_passes as torch_passes
from mkd.xtoken.loss_call import LossCall
from tests.losses.objectives import chunk_settings_of

pytestmark = pytest.mark.gpu
ROWS, STUDENT, TEACHER = 11, 5003, 9001  # columns: no multiples of anything
SETTINGS = [
    dict(),
    dict(divergence="reverse_kl", temperature=2.0),
    dict(divergence="mixed_kl", mixed_kl_weight=0.3),
    dict(divergence="jsd", jsd_beta=0.2, temperature=0.5),
    dict(divergence="skewed_forward_kl", skew_alpha=0.2),
    dict(divergence="skewed_reverse_kl", skew_alpha=0.2, temperature=2.0),
    dict(top_k=50),
]


def call_of(settings: dict, device: str, student: int = STUDENT, teacher: int = TEACHER) -> LossCall:
    """Return a call with a vocabulary where two thirds of the student's columns are common.

    Some columns of both models have no row.
    """
    common = torch.arange(student, device=device) % 3 != 0
    common[-1], common[: student // 10] = False, False
    student_real, teacher_real = (torch.arange(w, device=device) % 7 != 5 for w in (student, teacher))
    student_real, teacher_real = (
        student_real | common,
        teacher_real | torch.nn.functional.pad(common, (0, teacher - student)),
    )
    vocabulary = SimpleNamespace(
        rank=0, student_real=student_real[None], teacher_real=teacher_real[None], common=common[None]
    )
    settings = chunk_settings_of(**settings)
    return LossCall(vocabulary, settings, torch_passes, None)


def logits_of(call: LossCall, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [n, w_s], [n, w_t]: alike in some rows, one of them peaked.

    Columns without a row of the model are NaN.
    """
    codes = call.student_codes, call.teacher_codes
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        3 * torch.randn(ROWS, len(code), generator=generator).to(code.device) for code in codes
    )
    teacher[:4, : student.shape[1]] = student[:4] + 1e-3 * teacher[:4, : student.shape[1]]
    student[4, 777] = 60.0
    for values, code in zip((student, teacher), codes, strict=True):
        values[:, code == 0] = float("nan")
    return student.to(dtype), teacher.to(dtype)


def lowest_of(teacher: torch.Tensor, call: LossCall) -> torch.Tensor | None:
    top_k, width = call.settings.top_k, len(call.common)
    return (
        None
        if top_k is None
        else teacher[:, :width].masked_fill(~call.common, LOWEST).topk(top_k, dim=1).values[:, -1]
    )


def passes_of(
    call: LossCall, passes, dtype: torch.dtype, logits: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return everything that the passes make, from logits in this dtype; gradients in float64."""
    student, teacher = (values.to(dtype, copy=True) for values in logits)
    lowest, compute = lowest_of(teacher, call), torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.arange(ROWS, device=student.device)
    row_values = torch.linspace(-1.0, 1.0, ROWS, dtype=compute, device=student.device)
    found = {"sums": passes.support_sums(student, teacher, lowest, call)}
    totals = tuple(torch.logaddexp(*pair) for pair in found["sums"].split(2))
    found["parts"] = passes.support_parts(student, teacher, lowest, totals, call)
    found["teacher"] = passes.token_statistics(teacher, call.teacher_codes)
    found["largest"] = passes.largest(student, call.student_codes)
    of_support, of_chain = student.clone(), student.clone()
    passes.write_support_gradient(
        of_support, teacher, lowest, totals, (row_values, row_values.flip(0)), row_values, call
    )
    own = (
        torch.tensor([0, 1, 1, 3], device=rows.device),
        torch.tensor([1, 2, student.shape[1], 6], device=rows.device),
    )
    passes.fill(of_chain, *own, torch.full((4,), LOWEST, dtype=compute, device=rows.device))
    found["chain"] = passes.log_sums(of_chain, call.student_codes, call)
    passes.write_softmax_gradient(of_chain, call.student_codes, totals[0], row_values, call)
    passes.fill(of_chain, *own, row_values[:4])
    return found | {"of_support": of_support, "of_chain": of_chain}


def assert_passes_agree(settings: dict, dtype: torch.dtype, passes, device: str, **sizes: int) -> None:
    call = call_of(settings, device, **sizes)
    logits = logits_of(call, dtype)
    ours, exact = passes_of(call, passes, dtype, logits), passes_of(call, torch_passes, torch.float64, logits)
    for name, value in exact.items():
        scale = value[value.isfinite()].abs().amax() if name.startswith("of_") else 1.0
        tolerance = 1e-2 if name.startswith("of_") and dtype == torch.bfloat16 else 2e-6
        close = torch.isclose(
            ours[name].double(),
            value,
            rtol=tolerance if name.startswith("of_") else 1e-5,
            atol=tolerance * scale,
        )
        assert close.all(), (name, settings, float((ours[name].double() - value).abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equal_float64(settings, dtype):
    from mkd.xtoken import chunk_triton_passes as triton_passes

    assert_passes_agree(settings, dtype, triton_passes, "cuda")


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_loss_on_a_gpu(settings):
    from mkd.xtoken.fused import fused_chunk_kd
    from tests.xtoken.chunk_cases import random_case
    from tests.xtoken.test_fused import arguments

    ((hidden, weight), (teacher_hidden, teacher_weight), chunks), shared = arguments(
        random_case(), **settings
    )
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        own = [t.detach().to(device, dtype).requires_grad_() for t in (hidden, weight)]
        teacher = HeadInput(*(t.to(device, dtype) for t in (teacher_hidden, teacher_weight)))
        moved = shared | dict(vocabulary=shared["vocabulary"].to(device))
        on_device = map_tensors(chunks, methodcaller("to", device))
        output = fused_chunk_kd(HeadInput(*own), teacher, on_device, **moved, fp32_logits=True)
        output.loss.backward()
        results.append(
            (output.loss.detach(), output.teacher_ce, output.top1_agreement, *(t.grad for t in own))
        )
    for ours, exact in zip(*reversed(results), strict=True):
        torch.testing.assert_close(
            ours.double().cpu(), exact.double(), rtol=1e-4, atol=1e-5 * float(exact.abs().max())
        )
