"""The target of a cut: which sizes the student gets. Checked before any weight is read, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mkd.errors import ErrorList, MkdError, UsageError
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import model_parameters

FFN_MULTIPLE = 64  # of FFN channels that --target-params chooses: every tensor-parallel size divides them
WIDTH_FLAGS = {  # size -> flag
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_query_groups": "--num-query-groups",
    "hidden_size": "--hidden-size",
}
FLAGS = {"num_layers": "--num-layers", **WIDTH_FLAGS}


@dataclass(frozen=True)
class StudentSizes:
    """Sizes of a student, all of them."""

    num_layers: int
    ffn_hidden_size: int
    num_query_groups: int
    hidden_size: int

    @classmethod
    def of(cls, model: ModelShape) -> StudentSizes:
        """Return the sizes of a model whose layers are equally wide."""
        return cls(
            model.num_layers, model.common("ffn_hidden_size"), model.num_query_groups, model.hidden_size
        )

    def shape(self, teacher: ModelShape) -> ModelShape:
        """Return a model of these sizes; its layers are the teacher's first ones."""
        kept = teacher.layers[: self.num_layers]
        return replace(
            teacher,
            layers=tuple(replace(layer, ffn_hidden_size=self.ffn_hidden_size) for layer in kept),
            hidden_size=self.hidden_size,
            num_query_groups=self.num_query_groups,
            num_attention_heads=self.num_query_groups * teacher.heads_per_group,
        )


@dataclass(frozen=True)
class Sizes:
    """The sizes that a user asks for. None: as in the teacher, unless `target_params` decides it."""

    num_layers: int | None = None
    ffn_hidden_size: int | None = None
    num_query_groups: int | None = None  # key/value heads; the query heads of a group stay together
    hidden_size: int | None = None
    target_params: int | None = None  # the student has at most this many parameters

    def resolve(self, teacher: ModelShape) -> tuple[StudentSizes, ...]:
        """Return the sizes that the request allows; each has `target_params` met.

        Without a target there is one. A target is met by fewer layers, by fewer FFN channels, or by half of
        the layers and then channels; a size that is given is not touched. Raises UsageError, or ErrorList,
        for sizes that no cut of this teacher has.
        """
        if self == Sizes():
            raise UsageError(
                "no size of the student is given",
                "there is nothing to cut",
                f"give {', '.join(FLAGS.values())} or --target-params",
                code="add-flag",
            )
        problems = [*self._beyond(teacher), *self._not_expressible(teacher)]
        if problems:
            raise problems[0] if len(problems) == 1 else ErrorList(problems)
        given = {name: getattr(self, name) for name in FLAGS if getattr(self, name) is not None}
        full = replace(StudentSizes.of(teacher), **given)
        if self.target_params is None or num_parameters(full.shape(teacher)) <= self.target_params:
            return (full,)
        found: list[StudentSizes | None] = []
        if self.num_layers is None:
            found = [_fit(teacher, full, "num_layers", 1, self.target_params)]
        if self.ffn_hidden_size is None:
            starts = [full]
            if found and found[0] and full.num_layers - found[0].num_layers > 1:
                starts.append(replace(full, num_layers=-(-(full.num_layers + found[0].num_layers) // 2)))
            found += [
                _fit(teacher, one, "ffn_hidden_size", FFN_MULTIPLE, self.target_params) for one in starts
            ]
        if not any(found):
            raise self._out_of_reach(teacher, full)
        return tuple(one for one in found if one)

    def _out_of_reach(self, teacher: ModelShape, full: StudentSizes) -> UsageError:
        """Return the error for a target below the smallest student that `resolve` considers."""
        smallest = [full]
        if self.num_layers is None:
            smallest.append(replace(full, num_layers=1))
        if self.ffn_hidden_size is None:
            smallest.append(replace(full, ffn_hidden_size=min(FFN_MULTIPLE, full.ffn_hidden_size)))
        least = min(num_parameters(one.shape(teacher)) for one in smallest)
        return UsageError(
            f"--target-params {self.target_params:,} cannot be met by fewer layers or FFN channels alone",
            f"with the sizes given, the smallest such student has {least:,}",
            f"set the target to at least {least:,}, or give smaller sizes ({', '.join(FLAGS.values())})",
            code="out-of-range",
        )

    def _beyond(self, teacher: ModelShape) -> list[MkdError]:
        own_sizes = vars(StudentSizes.of(teacher)).items()
        asked = [(FLAGS[name], getattr(self, name), own) for name, own in own_sizes]
        asked.append(("--target-params", self.target_params, num_parameters(teacher)))
        return [
            UsageError(
                f"{flag} {size:,} is more than the teacher's {own:,}",
                "a student is cut out of the teacher",
                f"choose at most {own:,}",
                code="out-of-range",
            )
            for flag, size, own in asked
            if size is not None and size > own
        ]

    def _not_expressible(self, teacher: ModelShape) -> list[MkdError]:
        """List cuts whose result the family's configuration cannot describe."""
        narrows_hidden = self.hidden_size is not None and self.hidden_size != teacher.hidden_size
        if not narrows_hidden:
            return []
        if not teacher.common("pre_norms"):
            why = "its norms stand behind attention and MLP, and would have to scale with the hidden size"
        elif teacher.zero_centered_norms:
            why = "its embeddings are scaled by the hidden size, and its norms do not scale freely"
        else:
            return []
        return [
            UsageError(
                f"--hidden-size cannot cut a {teacher.family} model",
                why,
                "cut layers, FFN channels or attention groups instead",
                code="cut-not-supported",
            )
        ]


def _fit(teacher: ModelShape, full: StudentSizes, name: str, step: int, target: int) -> StudentSizes | None:
    """Return `full` with the largest `name` that meets the target, a multiple of `step`; None without one."""
    if num_parameters(full.shape(teacher)) <= target:
        return full
    largest = (getattr(full, name) - 1) // step * step
    smaller = (replace(full, **{name: size}) for size in range(largest, 0, -step))
    return next((one for one in smaller if num_parameters(one.shape(teacher)) <= target), None)


def num_parameters(shape: ModelShape) -> int:
    """Count the parameters of a model; a head that is tied to the embedding counts once."""
    return model_parameters(shape).total
