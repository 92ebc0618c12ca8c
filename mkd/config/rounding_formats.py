"""The formats that a student's weights may be rounded to, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

ROW = 0
"""Length of a group that is a whole row of a matrix."""


@dataclass(frozen=True)
class RoundingFormat:
    """Scales that elements of a matrix [out, in] share, and what its inputs may be rounded to."""

    name: str
    bits: int  # of an element
    title: str  # for the loss card
    groups: tuple[int, ...]  # lengths, along a row, of the elements with one scale; the first is the default
    block_rows: int = 1  # rows that share a scale
    inputs: str = ""  # how the inputs of products are rounded; "": they stay as they are
    has_tensor_scale: bool = False  # one more number for a matrix multiplies all scales
    is_calibrated: bool = False  # the inputs need a number that batches of text have to show first


FORMATS: Mapping[str, RoundingFormat] = MappingProxyType(
    {
        one.name: one
        for one in (
            RoundingFormat("int4", 4, "4-bit integers", (128, 64, 32)),
            RoundingFormat(
                "int8", 8, "8-bit integers", (ROW,), inputs="8-bit integers, a scale for each token"
            ),
            RoundingFormat("fp8", 8, "FP8 (E4M3)", (ROW,), inputs="FP8 (E4M3), a scale for each token"),
            RoundingFormat("fp8-block", 8, "FP8 (E4M3)", (128,), block_rows=128),
            RoundingFormat("mxfp4", 4, "MXFP4 (E2M1, scales are powers of two)", (32,)),
            RoundingFormat(
                "nvfp4",
                4,
                "NVFP4 (E2M1, scales in E4M3)",
                (16,),
                inputs="NVFP4, blocks of 16 channels",
                has_tensor_scale=True,
                is_calibrated=True,
            ),
        )
    }
)
"""Name -> format. Sources: OCP Microscaling Formats 1.0 (MXFP4), NVIDIA's description of NVFP4."""


@dataclass(frozen=True)
class Rounding:
    """The format of a student's matrices, and the modules that keep their precision."""

    format: str
    group: int  # elements of a row with one scale; ROW: all
    exclude: tuple[str, ...] = ()  # patterns of modules that keep their precision
    inputs: bool = False  # the inputs of rounded matrices are rounded, too

    @property
    def kind(self) -> RoundingFormat:
        """The format with its facts."""
        return FORMATS[self.format]

    def excludes(self, tensor: str) -> bool:
        """Return True if a pattern matches the module of a Hugging Face tensor."""
        module = tensor.removesuffix(".weight")
        return any(fnmatchcase(module, pattern) for pattern in self.exclude)

    def describe(self) -> str:
        """Return the format with its groups, such as `4-bit integers, a scale for 64 elements`."""
        rows = f"{self.kind.block_rows} x " if self.kind.block_rows > 1 else ""
        scale = "a scale for each row" if self.group == ROW else f"a scale for {rows}{self.group} elements"
        return f"{self.kind.title}, {scale}" + (
            " and one for the matrix" if self.kind.has_tensor_scale else ""
        )

    def as_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return dict(format=self.format, group=self.group, exclude=list(self.exclude), inputs=self.inputs)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Rounding:
        """Read an entry of a checkpoint's mkd.json; it may have more keys."""
        return cls(saved["format"], saved["group"], tuple(saved["exclude"]), saved["inputs"])
