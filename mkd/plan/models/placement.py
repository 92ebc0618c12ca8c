"""The decoder layers of a teacher, as a plan counts them: their place, and the precision of their products.

`mkd/kinds/placed` has all places and precisions. The facts of a run carry them, so that no plan knows one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mkd.config.schema import Config, TeacherConfig
from mkd.families.layer_shape import LayerShape
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes


class TeacherPlace(Protocol):
    """Where a teacher's decoder layers are while they do not compute."""

    @property
    def streams(self) -> bool:
        """True if layers come to the device one after another."""

    @property
    def shares_base(self) -> bool:
        """True if all of the teacher's weights are the student's, embedding and head included."""

    @property
    def processes(self) -> int:
        """Number of processes that share every layer through a communicator; 1 if none do."""

    def device_bytes(self, layers: Sequence[int]) -> int:
        """Return the bytes on the device of decoder layers with these bytes."""

    def transfer_ms(self, nbytes: int) -> float:
        """Return the time to bring a layer of that many bytes to the device; 0 if it is there."""


class TeacherPrecision(Protocol):
    """The precision of the products in a teacher's decoder layers."""

    @property
    def title(self) -> str:
        """Name in texts of a plan; empty for the precision of the run."""

    @property
    def input_bytes(self) -> int:
        """Bytes of each input of a product that it makes in its own precision."""

    @property
    def decoded_bytes(self) -> float:
        """Bytes moved for each weight of experts that is decoded before a product; 0: none is."""

    def product_time(self, shape: ModelShape) -> float:
        """Return the time of the layers' products over the time in the run's precision."""

    def layer_bytes(self, shape: ModelShape, layer: LayerShape, sizes: Sizes, element: int) -> int:
        """Return the bytes of a layer on one process. `element`: bytes of a weight in the run's precision."""


@dataclass(frozen=True)
class Variant:
    """Settings of all teachers that a plan compares with others."""

    name: str  # empty: the others of its kind have names
    settings: Mapping[str, Any]  # to write on the command line or in the file
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of settings that it does not read
    title: str = ""  # of the precision, if it changes what a teacher predicts

    @property
    def is_exact(self) -> bool:
        """True if teachers predict the same as with the simplest settings."""
        return not self.title

    def text(self, is_only: bool) -> str:
        """Return what to write on the command line, or in the file if there are several teachers."""
        if is_only:
            return " ".join(f"--teacher-{name} {value}" for name, value in self.settings.items())
        return ", ".join(f"{name}: {value}" for name, value in self.settings.items()) + " for every teacher"

    def apply(self, config: Config) -> Config:
        """Return `config` with these settings of every teacher."""
        values = {**self.defaults, **self.settings}
        return replace(config, teachers=tuple(replace(one, **values) for one in config.teachers))

    def is_of(self, teacher: TeacherConfig) -> bool:
        """Return True if the teacher has these settings."""
        return all(getattr(teacher, name) == value for name, value in self.settings.items())

    def __add__(self, other: Variant) -> Variant:
        return Variant(
            ", ".join(name for name in (other.name, self.name) if name),
            {**self.settings, **other.settings},
            {**self.defaults, **other.defaults},
            self.title or other.title,
        )
