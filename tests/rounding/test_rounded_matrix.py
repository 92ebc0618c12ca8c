"""Rounded matrices against the definition of their formats."""

from __future__ import annotations

import pytest
import torch

from mkd.config.rounding_formats import Rounding
from mkd.rounding import rounded_matrix
from mkd.rounding.number_grids import E2M1_VALUES, e2m1_codes, e2m1_numbers, to_e2m1, to_e4m3, to_integer
from mkd.rounding.rounded_matrix import encode, round_in_place, shared_peak
from tests.rounding.plain_rounding import E2M1, E4M3, GROUPS, INT4, even_mantissas, nearest, rounded


def matrix(rows: int = 256, columns: int = 256) -> torch.Tensor:
    """Return weights of several sizes, with groups of zeros, of tiny values and of equal ones."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, columns, generator=generator) * torch.logspace(-4, 1, rows)[:, None]
    values[3, :64], values[4, :32], values[5] = 0.0, 1e-30, 0.75
    return values.bfloat16()


@pytest.mark.parametrize("name", GROUPS)
def test_a_matrix_is_rounded_as_defined_whatever_its_parts(name, monkeypatch):
    weight, rounding = matrix(), Rounding(name, GROUPS[name])
    expected = rounded(weight, name).bfloat16()
    peak = shared_peak(weight, rounding)
    for at_once in (2**24, 256 * 128, 1):  # all rows, some, as few as possible
        monkeypatch.setattr(rounded_matrix, "AT_ONCE", at_once)
        found = weight.clone()
        round_in_place(found, rounding, peak)
        assert torch.equal(found, expected)
    assert torch.equal(encode(weight, rounding, peak).values().bfloat16(), expected)


@pytest.mark.parametrize("name", ["int4", "mxfp4", "nvfp4"])
def test_columns_of_a_matrix_are_rounded_as_in_the_whole(name):
    weight, rounding = matrix(), Rounding(name, GROUPS[name])
    peak = shared_peak(weight, rounding)
    whole, left, right = weight.clone(), weight[:, :128].clone(), weight[:, 128:].clone()
    for part in (whole, left, right):
        round_in_place(part, rounding, peak)
    assert torch.equal(whole, torch.cat((left, right), dim=1))


def test_ties_go_to_the_even_number():
    x = torch.cat(
        (torch.linspace(-7, 7, 2801), torch.tensor([-100.0, 100.0, 0.25, 0.75, 1.25, 2.5, 3.5, 5.0]))
    )
    assert torch.equal(to_e2m1(x), nearest(x, E2M1, even_mantissas(E2M1, "mxfp4")))
    assert torch.equal(to_integer(x, 4), nearest(x, INT4, even_mantissas(INT4, "int4")))
    wide = torch.cat((x * 64, torch.tensor([464.0, 0.0009765625, 0.0029296875])))
    assert torch.equal(to_e4m3(wide), nearest(wide, E4M3, even_mantissas(E4M3, "fp8")))
    assert e2m1_codes(torch.tensor(E2M1_VALUES)).tolist() == list(range(8))
    assert torch.equal(e2m1_numbers(e2m1_codes(to_e2m1(x))), to_e2m1(x))
