"""The batches of a run whose text agents sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mkd.data.batch import PackedBatch
from mkd.errors import DataError
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

    def _tags(self, rollouts: Sequence[Rollout]) -> np.ndarray | None:
        if self.tag_names:
            for one in rollouts:
                self._require_teacher(one)
        return super()._tags(rollouts)

    def _require_teacher(self, rollout: Rollout) -> None:
        """Raise DataError, on all ranks, for a record whose tag is none of the run."""
        assert isinstance(rollout, RecordedRollout)
        if self._tag(rollout) in self.tag_names:
            return
        file, line = rollout.place
        given = f"the tag {rollout.tag}" if rollout.tag else "no tag"
        what = f"{file}:{line}: the record {rollout.id} has {given}"
        why = f"teachers and data of the run have the tags {', '.join(self.tag_names)}"
        error = DataError(what, why, "write one of them as its tag", code="record-value-not-valid")
        error.on_all_ranks = True
        raise error

    def _requests(self, consumed: int) -> list[Request]:
        return []

    def _progress(self, start: float) -> Callable[[int], None]:
        return lambda done: self.announce(self.iteration)

    def _judge_truncated(self, truncated: float) -> None:
        """Say nothing: the writer decides how long its texts are."""
