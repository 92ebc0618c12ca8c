"""The target of a cut: which sizes the student gets. Checked before any weight is read, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mkd.errors import ErrorList, MkdError, UsageError
from mkd.plan.memory import stage_parameters
from mkd.plan.model_shape import ModelShape

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

    def resolve(self, teacher: ModelShape) -> StudentSizes:
        """Return all sizes, with `target_params` met.

        A target is met by fewer layers; if `num_layers` is given, by fewer FFN channels. Raises UsageError,
        or ErrorList, for sizes that no cut of this teacher has.
        """
        if self == Sizes():
            raise UsageError(
                "no size of the student is given",
                "there is nothing to cut",
                f"give {', '.join(FLAGS.values())} or --target-params",
                code="student-size-missing",
            )
        problems = [*self._beyond(teacher), *self._not_expressible(teacher)]
        if problems:
            raise problems[0] if len(problems) == 1 else ErrorList(problems)
        given = {name: getattr(self, name) for name in FLAGS if getattr(self, name) is not None}
        full = replace(StudentSizes.of(teacher), **given)
        if self.target_params is None or num_parameters(full.shape(teacher)) <= self.target_params:
            return full
        if self.num_layers is None:
            return self._fit(teacher, full, "num_layers", 1, self.target_params)
        if self.ffn_hidden_size is None:
            return self._fit(teacher, full, "ffn_hidden_size", FFN_MULTIPLE, self.target_params)
        raise self._out_of_reach(num_parameters(full.shape(teacher)), "the sizes given already decide it")

    def _fit(
        self, teacher: ModelShape, full: StudentSizes, name: str, step: int, target: int
    ) -> StudentSizes:
        """Return `full` with the largest `name`, a multiple of `step`, that meets the target."""
        largest = (getattr(full, name) - 1) // step * step
        smaller = [replace(full, **{name: size}) for size in range(largest, 0, -step)]
        found = next((one for one in smaller if num_parameters(one.shape(teacher)) <= target), None)
        if found is None:
            least = num_parameters((smaller or [full])[-1].shape(teacher))
            raise self._out_of_reach(least, f"the smallest {FLAGS[name]} still leaves that many")
        return found

    def _out_of_reach(self, least: int, why: str) -> UsageError:
        return UsageError(
            f"--target-params {self.target_params:,} cannot be met: the student has at least {least:,}",
            why,
            f"raise the target, or give smaller sizes ({', '.join(FLAGS.values())})",
            code="target-params-too-small",
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
                code="student-larger-than-teacher",
            )
            for flag, size, own in asked
            if size is not None and size > own
        ]

    def _not_expressible(self, teacher: ModelShape) -> list[MkdError]:
        """List cuts whose result the family's configuration cannot describe."""
        narrows_hidden = self.hidden_size is not None and self.hidden_size != teacher.hidden_size
        if not (narrows_hidden and (teacher.zero_centered_norms or teacher.embedding_scale != 1.0)):
            return []
        return [
            UsageError(
                f"--hidden-size cannot cut a {teacher.family} model",
                "its embeddings are scaled by the hidden size, and its norms do not scale freely",
                "cut layers, FFN channels or attention groups instead",
                code="hidden-cut-not-supported",
            )
        ]


def num_parameters(shape: ModelShape) -> int:
    """Count the parameters of a model; a head that is tied to the embedding counts once."""
    return stage_parameters(shape, shape.layers, 1, shape.vocab_size, True, True)
