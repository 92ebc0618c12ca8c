"""Find which names of a folder's tensors stand for which names that config.json calls for.

A guess that is wrong would swap two weights of the same shape without a word, such as the norms of a layer.
So only names of the same form but for one part count as the same, and the only names with a shape.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix

from mkd.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]  # name -> shape
Form = frozenset[tuple[tuple[str, ...], tuple[int, ...]]]  # numbers of the layer and the expert, and a shape

FEW = 3  # differences that stay problems of their own
SHOWN = 4  # pairs of an error
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
ANY_NUMBER = "N"
ENDS = ("weight", "bias")
DO = (
    "save the model with model.save_pretrained(DIR) of transformers, or convert it with the converter of "
    "the program that wrote it"
)


@dataclass(frozen=True)
class Renaming:
    """Names of one form, such as `model.layers.N.attn.q_proj.weight`, and the form that is called for."""

    found: str
    wanted: str
    count: int

    @property
    def parts(self) -> tuple[str, str]:
        """The parts that differ, with the dots around them."""
        ours, theirs = f".{self.found}.", f".{self.wanted}."
        start = commonprefix([ours, theirs]).rfind(".")
        after = commonprefix([ours[:start:-1], theirs[:start:-1]]).rfind(".")
        return ours[start : len(ours) - after], theirs[start : len(theirs) - after]

    @property
    def is_clear(self) -> bool:
        """True if one part differs, and it is not the one that says which of a layer's tensors this is."""
        return all(part.count(".") == 2 for part in self.parts) and _leaf(self.found) == _leaf(self.wanted)


def renamed(place: str, expected: Shapes, found: Shapes, is_sharded: bool) -> CheckpointError | None:
    """Return the error for tensors whose names stand for others that are missing; None if few do."""
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    ours, theirs = _by_form(missing, expected), _by_form(extra, found)
    pairs: list[Renaming] = []
    unclear: list[str] = []
    count = 0
    for form in theirs.keys() & ours.keys():
        known, others = _matched(theirs[form], ours[form], len(form))
        pairs += known
        unclear += [others] if others else []
        count += len(form) * len(theirs[form])
    if count < FEW:
        return None
    shown = [f"{one.found} looks like {one.wanted}" for one in sorted(pairs, key=lambda one: one.found)]
    shown += sorted(unclear)
    more = f"; and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    rule = "" if is_sharded else _renaming(pairs, missing, extra)
    return CheckpointError(
        f"{place}: {count} tensors have other names than config.json calls for: "
        f"{'; '.join(shown[:SHOWN])}{more}",
        "they have the same shapes, and a tensor under another name would not be read",
        f"{DO}. If nothing but the names differs: {rule}" if rule else DO,
        code="hf-tensor-prefix",
    )


def of_another_program(place: str, family: object, expected: Shapes, found: Shapes) -> CheckpointError | None:
    """Return the error for weights of which most have other names; None if most have the right ones."""
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    if 2 * len(missing) < len(expected) or len(extra) < FEW:
        return None
    theirs, ours = (", ".join(sorted(names)[:2]) for names in (extra, missing))
    return CheckpointError(
        f"{place}: {len(missing)} of {len(expected)} tensors are missing, and {len(extra)} others are there: "
        f"{theirs} ... instead of {ours} ...",
        f"the weights are of another program or another model than config.json, whose family is {family}",
        f"{DO}, or copy config.json from the folder that the weights come from",
        code="hf-tensor-prefix",
    )


def _by_form(names: Collection[str], shapes: Shapes) -> dict[Form, list[str]]:
    """Return the names with ANY_NUMBER in place of their numbers, by numbers and shapes."""
    numbered: dict[str, set[tuple[tuple[str, ...], tuple[int, ...]]]] = defaultdict(set)
    for name in names:
        numbered[NUMBER.sub(ANY_NUMBER, name)].add((tuple(NUMBER.findall(name)), shapes[name]))
    found: dict[Form, list[str]] = defaultdict(list)
    for name, one in sorted(numbered.items()):
        found[frozenset(one)].append(name)
    return found


def _matched(found: Sequence[str], wanted: Sequence[str], count: int) -> tuple[list[Renaming], str]:
    """Return the pairs of names of one form that belong together, and a text about the others."""
    alike = [Renaming(one, other, count) for one in found for other in wanted]
    clear = [one for one in alike if one.is_clear]
    pairs = [one for one in clear if not any(_meet(one, other) for other in clear)]
    here, there = (
        [name for name in names if all(name not in (one.found, one.wanted) for one in pairs)]
        for names in (found, wanted)
    )
    if len(here) == len(there) == 1:
        return [*pairs, Renaming(here[0], there[0], count)], ""
    return pairs, f"{' and '.join(here)} could be {' or '.join(there)}" if here and there else ""


def _meet(one: Renaming, other: Renaming) -> bool:
    return one != other and (one.found == other.found or one.wanted == other.wanted)


def _leaf(name: str) -> str:
    return next((part for part in reversed(name.split(".")) if part not in ENDS), name)


def _renaming(pairs: Collection[Renaming], missing: Collection[str], extra: Collection[str]) -> str:
    """Return Python that renames the tensors of a file; "" if replacing the parts is not enough."""
    rules = sorted({pair.parts for pair in pairs}, key=lambda parts: (-len(parts[0]), parts))
    if set(_renamed(rules, extra)) != set(missing):
        return ""
    name = "('.' + n + '.')" + "".join(f".replace({old!r}, {new!r})" for old, new in rules) + "[1:-1]"
    read = "safetensors.torch.load_file(FILE)"
    return f"safetensors.torch.save_file({{{name}: t for n, t in {read}.items()}}, FILE)"


def _renamed(rules: Collection[tuple[str, str]], names: Collection[str]) -> Iterator[str]:
    for name in names:
        changed = f".{name}."
        for old, new in rules:
            changed = changed.replace(old, new)
        yield changed[1:-1]
