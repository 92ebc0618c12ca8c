"""Completions that the training model samples itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkd.kinds.sampled.sources.text_source import SourceParts, TextSource

if TYPE_CHECKING:  # it loads torch
    from mkd.kinds.sampled.rollout_stream import InProcessSource


class InProcess(TextSource):
    """The training model itself."""

    def build(self, parts: SourceParts) -> InProcessSource:
        from mkd.kinds.sampled.rollout_stream import InProcessSource

        engine = parts.engine
        return InProcessSource(parts.state.models, engine.context, parts.sampling, engine.parameters_gathered)
