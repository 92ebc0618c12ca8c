"""Notice matrices that hold one value everywhere: nobody has filled them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mkd.errors import CheckpointError

PROBES, SHOWN = 16, 3  # places that are compared first; names in a note


def one_value(matrix: Tensor) -> float | None:
    """Return the value that all elements have; None if they differ, and for a vector.

    Norms and biases of one value are usual. A few places tell almost every matrix.
    """
    if matrix.dim() < 2 or matrix.numel() < PROBES:
        return None
    first = matrix[(0,) * matrix.dim()]
    rows = matrix[:: max(1, matrix.shape[0] // PROBES)]
    if bool((rows.diagonal(dim1=0, dim2=-1) != first).any()) or bool((matrix != first).any()):
        return None
    return float(first)


def unfilled_embedding(file: str, tensor: str, value: float) -> CheckpointError:
    """Return the error for an embedding of one `value`."""
    return CheckpointError(
        f"{file}: every element of {tensor} is {value:g}",
        "all tokens look the same to such a model: the weights were never filled, or not saved whole",
        "download the model again, or save it again from the program that has its weights",
        code="hf-files-damaged",
    )


def unfilled_note(place: str, found: Mapping[str, float]) -> str:
    """Return a line about the matrices of a folder that hold one value, by name; "" if there are none."""
    if not found:
        return ""
    shown = ", ".join(f"{name} ({value:g})" for name, value in sorted(found.items())[:SHOWN])
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    verb = "matrix holds" if len(found) == 1 else "matrices hold"
    return (
        f"note: {len(found)} {verb} one value everywhere in {place}: {shown}{more}. Such weights were never "
        "filled or not saved, unless they were added empty on purpose: download or save the model again"
    )
