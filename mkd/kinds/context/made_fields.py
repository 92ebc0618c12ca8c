"""Fields of contexts that a step of sampling fills."""

from __future__ import annotations

from mkd.config.prompt_template import MADE, template_fields
from mkd.config.schema import Config


def made_fields(config: Config) -> frozenset[str]:
    """Return the fields that the teachers' prompts need of completions: `feedback`, `sibling`.

    Empty unless the run samples completions of prompts.
    """
    if not config.rollout.is_on or config.rollout.rollout_source == "records" or not config.needs_models:
        return frozenset()
    contexts = [one.context for one in config.teachers if one.context is not None]
    return frozenset(MADE) & {name for one in contexts for text in one.texts for name in fields_of(text)}


def fields_of(text: str) -> tuple[str, ...]:
    """Return the fields of a text, () if it is not a template, which is reported elsewhere."""
    try:
        return template_fields(text)
    except ValueError:
        return ()
