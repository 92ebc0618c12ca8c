"""The settings of teachers by the tag of a record. Its teachers and files: see mkd/config/tag_rules.py."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import option

ROUTE = "route"
"""The value of --teacher-combination."""


@dataclass(frozen=True)
class RouteSettings:
    """Part of the objective: tags of records."""

    tag_key: str | None = option(
        None,
        "key of the tag in every record, with --teacher-combination route. A record without it has the tag "
        "of its file, see --data-tags (default: records have the tags of their files)",
    )
    tag_weights: tuple[str, ...] = option(
        (),
        "TAG=NUMBER ..., weights of the tags in the distillation loss, divided by their sum. Each tag's loss "
        "is then a mean over its own tokens, whatever their number (default: one mean over the tokens of all "
        "tags)",
    )
