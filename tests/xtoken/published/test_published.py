"""The dense top-k form of projection matrices, in three kinds of files; and when this package is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mkd.errors import UsageError
from mkd.xtoken.published.projections import load_published
from tests.reported import refused

ROOT = Path(__file__).resolve().parents[3]
# The fifth row is beyond the student's tokenizer.
INDICES = torch.tensor([[2, 1], [0, -1], [3, 3], [1, 2], [9, 9]])
LIKELIHOODS = torch.tensor([[0.75, 0.25], [1.0, 0.0], [0.25, 0.25], [0.0, 0.0], [1.0, 1.0]])


def write(path, indices=INDICES, likelihoods=LIKELIHOODS):
    if path.suffix == ".npz":
        np.savez(path, indices=indices.numpy(), likelihoods=likelihoods.numpy())
    elif path.suffix == ".safetensors":
        save_file({"indices": indices, "likelihoods": likelihoods}, path)
    else:
        torch.save({"indices": indices, "likelihoods": likelihoods}, path)
    return path


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".npz"])
def test_all_kinds_of_files(tmp_path, suffix):
    matrix = load_published(write(tmp_path / f"m{suffix}"), 4, 5)
    assert matrix.shape == (4, 5) and matrix.empty_rows.tolist() == [3]
    assert [matrix.row(i) for i in range(4)] == [{1: 0.25, 2: 0.75}, {0: 1.0}, {3: 1.0}, {}]


def test_half_precision_rows_add_up_to_one(tmp_path):
    likelihoods = torch.rand(50, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    path = write(tmp_path / "m.pt", torch.arange(7).repeat(50, 1).int(), likelihoods)
    np.testing.assert_allclose(load_published(path, 50, 7).row_sums(), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("indices", "likelihoods", "why"),
    [
        (INDICES[:3], LIKELIHOODS[:3], "it has 3 rows"),
        (INDICES, LIKELIHOODS[:4], "do not share a shape"),
        (INDICES + 2, LIKELIHOODS, "it names teacher id 5"),
        (INDICES, -LIKELIHOODS, "not all finite and positive"),
        (INDICES, LIKELIHOODS / 0, "not all finite and positive"),
    ],
)
def test_matrices_of_other_vocabularies_are_refused(tmp_path, indices, likelihoods, why):
    with refused("projection-does-not-fit: is not a projection matrix for", UsageError) as error:
        load_published(write(tmp_path / "m.pt", indices, likelihoods), 4, 5)
    assert why in error.value.why  # one code for every way in which a matrix may not fit


def test_files_of_another_form_are_refused(tmp_path):
    torch.save({"matrix": INDICES}, tmp_path / "a.pt")
    (tmp_path / "b.safetensors").write_bytes(b"no")
    torch.save({"indices": INDICES, "likelihoods": print}, tmp_path / "c.pt")  # code is never run
    for name, why in (("a.pt", "indices"), ("b.safetensors", "header"), ("c.pt", "they could run code")):
        with refused("projection-does-not-fit: is not a projection matrix for", UsageError) as error:
            load_published(tmp_path / name, 4, 5)
        assert why in error.value.why.lower() and "weights_only" not in error.value.why


def test_a_run_imports_published_losses_only_if_it_uses_one():
    code = "import sys; from mkd.xtoken.fused import loss_function"
    for loss in ("p_kl", "uld"):
        code += f"; loss_function('{loss}'); print('mkd.xtoken.published' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
