"""A cut: which parts of the teacher stay, and the shape and config.json of the student made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mkd.errors import UsageError
from mkd.families.family import FULL, SLIDING
from mkd.plan.models.model_shape import ModelShape
from mkd.pruning.sizes import StudentSizes

OVERRIDES = "per_layer_config"  # index of a layer -> its values, for some layers
BY_LAYER = ("layer_types", "no_rope_layers")  # keys of config.json with a value for every layer


@dataclass(frozen=True)
class Cut:
    """The kept parts by their indices in the teacher, ascending. None: all of them.

    `ffn` and `groups` have an entry for each kept layer, all of one length: layers of one size.
    """

    layers: tuple[int, ...]
    hidden: tuple[int, ...] | None = None
    ffn: tuple[tuple[int, ...], ...] | None = None  # FFN channels
    groups: tuple[tuple[int, ...], ...] | None = (
        None  # attention groups: a key/value head and its query heads
    )
    norm_factors: Mapping[str, float] = field(default_factory=dict)
    """Hugging Face name of a teacher's norm weight -> factor of what is left of it.

    RMSNorm divides by the size of all channels. Without the ones that were cut that size differs, on average
    by this factor.
    """

    @property
    def is_narrower(self) -> bool:
        """True if channels or attention groups are cut, not only layers."""
        return bool(self.ffn or self.groups or self.hidden)

    def shape(self, teacher: ModelShape) -> ModelShape:
        """Return the student's shape, windows and position embeddings of the kept layers included."""
        sizes = StudentSizes(
            num_layers=len(self.layers),
            ffn_hidden_size=len(self.ffn[0]) if self.ffn else teacher.layers[0].ffn_hidden_size,
            num_query_groups=len(self.groups[0]) if self.groups else teacher.num_query_groups,
            hidden_size=len(self.hidden) if self.hidden else teacher.hidden_size,
        )
        kept = tuple(teacher.layers[layer] for layer in self.layers)
        return sizes.shape(replace(teacher, layers=kept))

    def config(self, teacher: ModelShape) -> dict[str, Any]:
        """Return the student's config.json.

        Raises UsageError if the family cannot describe the student: read back, it would be another model.
        """
        student, config = self.shape(teacher), dict(teacher.hf_config)
        config["num_hidden_layers"] = student.num_layers
        for name in filter(config.get, BY_LAYER):
            values = config[name]
            config[name] = [values[min(layer, len(values) - 1)] for layer in self.layers]
        if config.get(OVERRIDES):
            given, places = config[OVERRIDES], enumerate(map(str, self.layers))
            config[OVERRIDES] = {str(new): given[old] for new, old in places if old in given}
        windows = {layer.sliding_window for layer in teacher.layers}
        if len(windows) > 1 and not config.get("layer_types"):  # kinds follow from the index
            config["layer_types"] = [SLIDING if layer.sliding_window else FULL for layer in student.layers]
        if self.ffn:
            config["intermediate_size"] = student.layers[0].ffn_hidden_size
        if self.groups:
            config["num_key_value_heads"] = student.num_query_groups
            config["num_attention_heads"] = student.num_attention_heads
        if self.hidden:
            config["hidden_size"] = student.hidden_size
        if self.groups or self.hidden:
            config["head_dim"] = student.head_dim  # its default is the hidden size over the heads
        described = ModelShape.from_hf_config(config)
        differences = described.differences(student)
        if differences:
            raise UsageError(
                f"a {teacher.family} config.json cannot describe this cut: {', '.join(differences)}",
                "the written student would compute something else",
                "cut other sizes",
                code="cut-not-supported",
            )
        return config


def first_parts(sizes: StudentSizes, teacher: ModelShape) -> Cut:
    """Return a cut to `sizes` before anything is chosen: the first layers, channels and groups."""
    own, layers = StudentSizes.of(teacher), tuple(range(sizes.num_layers))
    if not may_end(teacher, layers[-1]):
        layers = (*layers[:-1], teacher.num_layers - 1)
    ffn, groups = tuple(range(sizes.ffn_hidden_size)), tuple(range(sizes.num_query_groups))
    return Cut(
        layers,
        hidden=tuple(range(sizes.hidden_size)) if sizes.hidden_size < own.hidden_size else None,
        ffn=(ffn,) * len(layers) if len(ffn) < own.ffn_hidden_size else None,
        groups=(groups,) * len(layers) if len(groups) < own.num_query_groups else None,
    )


def may_end(teacher: ModelShape, layer: int) -> bool:
    """Return True if the teacher's layer of that index may be a student's last one.

    Where layers differ in their heads, transformers reads the last one as full attention.
    """
    last = teacher.layers[-1].heads
    return last is None or teacher.layers[layer].heads == last


def evenly_spaced(num_layers: int, kept: int) -> tuple[int, ...]:
    """Return `kept` of `num_layers` layer indices, the first and the last included."""
    return tuple(round(i * (num_layers - 1) / max(kept - 1, 1)) for i in range(kept))


def without_block(num_layers: int, start: int, length: int) -> tuple[int, ...]:
    """Return the layers that stay if `length` of them, from `start` on, are removed."""
    return (*range(start), *range(start + length, num_layers))


def without_middle(num_layers: int, kept: int) -> tuple[int, ...]:
    """Return `kept` layers: all but a block in the middle."""
    return without_block(num_layers, (kept + 1) // 2, num_layers - kept)
