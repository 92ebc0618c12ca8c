"""`MixerShape`: what a decoder layer may have in place of attention, a recurrence over the tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar


class MixerShape(ABC):
    """A projection, a short convolution, a recurrence, a gated norm and a projection.

    Each head has a state [key_dim, value_dim]. A *block* is a run of heads that share keys. Tensor and
    context parallelism cut between blocks.
    """

    title: ClassVar[str]  # in texts, after an article
    blocks_title: ClassVar[str]  # what its blocks are called
    has_corrections: ClassVar[bool]  # tokens subtract what their key already finds in the state
    key_dim: int
    value_dim: int
    kernel_size: int  # tokens that the convolution sees, the current one included

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Number of blocks."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """Number of heads, each with its state."""

    @property
    @abstractmethod
    def projected_parts(self) -> tuple[int, ...]:
        """Channels of a block behind the input projection, part by part."""

    @property
    @abstractmethod
    def convolved_parts(self) -> tuple[int, int, int]:
        """Channels of a block that the convolution mixes over time, part by part."""

    @property
    @abstractmethod
    def cut_parameters(self) -> int:
        """Parameters between the projections that belong to blocks."""

    @property
    @abstractmethod
    def shared_parameters(self) -> int:
        """Parameters between the projections that all blocks share."""

    @property
    def heads_per_block(self) -> int:
        """Heads of a block."""
        return self.heads // self.blocks

    @property
    def projected_width(self) -> int:
        """Channels of all blocks behind the input projection."""
        return self.blocks * sum(self.projected_parts)

    @property
    def convolved_width(self) -> int:
        """Channels of the convolution."""
        return self.blocks * sum(self.convolved_parts)

    @property
    def output_width(self) -> int:
        """Channels in front of the output projection."""
        return self.heads * self.value_dim


@dataclass(frozen=True)
class DeltaShape(MixerShape):
    """A gated delta net. A block is a key head with the value heads that share it.

    Source: Yang et al. 2024, Gated Delta Networks (https://arxiv.org/abs/2412.06464).
    """

    title: ClassVar[str] = "gated delta net"
    blocks_title: ClassVar[str] = "key heads"
    has_corrections: ClassVar[bool] = True

    key_heads: int  # heads of queries and keys
    value_heads: int  # a multiple of `key_heads`
    key_dim: int  # channels of a query or key head
    value_dim: int  # channels of a value head
    kernel_size: int

    @property
    def blocks(self) -> int:
        return self.key_heads

    @property
    def heads(self) -> int:
        return self.value_heads

    @property
    def convolved_parts(self) -> tuple[int, int, int]:
        """Channels of a block's query, key and values."""
        return self.key_dim, self.key_dim, self.heads_per_block * self.value_dim

    @property
    def projected_parts(self) -> tuple[int, ...]:
        """Channels of a block's query, key, values, gates z, then b and a."""
        return *self.convolved_parts, self.heads_per_block * self.value_dim, *(self.heads_per_block,) * 2

    @property
    def cut_parameters(self) -> int:
        """Numbers of the convolution, decays and their biases."""
        return self.kernel_size * self.convolved_width + 2 * self.heads

    @property
    def shared_parameters(self) -> int:
        """The weight of the norm of a head."""
        return self.value_dim


@dataclass(frozen=True)
class MambaShape(MixerShape):
    """Mamba-2 with groups. A block is a group, one B and one C, with the heads that share them.

    B has the part of keys, C that of queries, and x times the step that of values. Source: Dao and Gu 2024,
    Transformers are SSMs (https://arxiv.org/abs/2405.21060), section 7.
    """

    title: ClassVar[str] = "Mamba-2 mixer"
    blocks_title: ClassVar[str] = "groups"
    has_corrections: ClassVar[bool] = False

    groups: int
    num_heads: int  # a multiple of `groups`
    key_dim: int  # channels of B and of C, the size of the state
    value_dim: int  # channels of a head
    kernel_size: int
    least_step: float  # smaller steps are raised to it

    @property
    def blocks(self) -> int:
        return self.groups

    @property
    def heads(self) -> int:
        return self.num_heads

    @property
    def convolved_parts(self) -> tuple[int, int, int]:
        """Channels of a block's x, B and C."""
        return self.heads_per_block * self.value_dim, self.key_dim, self.key_dim

    @property
    def projected_parts(self) -> tuple[int, ...]:
        """Channels of a block's gates z, then x, B and C, and the steps."""
        return self.heads_per_block * self.value_dim, *self.convolved_parts, self.heads_per_block

    @property
    def cut_parameters(self) -> int:
        """Numbers of the convolution with its bias, decays, steps' biases, D, and the norm's weight."""
        return (self.kernel_size + 1) * self.convolved_width + 3 * self.heads + self.output_width

    @property
    def shared_parameters(self) -> int:
        return 0


def mixer_facts(mixer: MixerShape | None) -> dict[str, Any]:
    """Return name -> value of a mixer's kind and fields. All mixers, and None, have the same names."""
    names = dict.fromkeys(one.name for kind in (DeltaShape, MambaShape) for one in fields(kind))
    return {"kind": mixer and mixer.title} | {name: getattr(mixer, name, None) for name in names}
