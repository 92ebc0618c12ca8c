"""The batches of a run whose text agents sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mkd.data.batch import PackedBatch
from mkd.kinds.sampled.records.agent_record import RecordedRollout
from mkd.kinds.sampled.rollout_stream import RolloutStream
from mkd.kinds.sampled.sampler.rollouts import Request, Rollout


@dataclass
class RecordStream(RolloutStream):
    """As its base class, without prompts: `consumed_prompts` counts groups of records."""

    def next_step(self) -> list[PackedBatch]:
        batches = super().next_step()
        self.figures |= self.source.figures  # type: ignore[attr-defined]  # of a RecordSource
        return batches

    def documents_of(self, sample: int) -> dict[str, list[int]]:
        if sample < self._first:
            return super().documents_of(sample)
        found: dict[str, list[int]] = {}
        for one in self._packs.packs[sample - self._first] if self._packs else ():
            assert isinstance(one, RecordedRollout)
            file, line = one.place
            found.setdefault(file, []).append(line)
        return found

    def _tag(self, rollout: Rollout) -> str:
        assert isinstance(rollout, RecordedRollout)
        return rollout.tag or ""

    def _requests(self, consumed: int) -> list[Request]:
        return []

    def _progress(self, start: float) -> Callable[[int], None]:
        return lambda done: self.announce(self.iteration)

    def _judge_truncated(self, truncated: float) -> None:
        """Say nothing: the writer decides how long its texts are."""
