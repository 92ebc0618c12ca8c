"""The hooks of a source of completions. Its module is loaded without torch; only `build` may load it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mkd.config.schema import Config
from mkd.errors import UsageError

if TYPE_CHECKING:  # they load torch
    from mkd.checkpoint.distributed import TrainingState
    from mkd.kinds.sampled.sampler.rollouts import RolloutSource, Sampling
    from mkd.resolve.run_plan import Plan
    from mkd.train.step import Engine


@dataclass(frozen=True)
class SourceParts:
    """The parts of a run that a source may use."""

    plan: Plan
    engine: Engine
    state: TrainingState
    sampling: Sampling
    fingerprints: Mapping[str, object]  # of the run, which decide the completions
    resumes: bool  # False: files in the run's folders are another run's
    last_iteration: int = 0  # steps so far
    tag_names: tuple[str, ...] = ()  # of all tags of the run; (): tags do not matter
    is_stopped: Callable[[], bool] = lambda: False  # a signal asks the run to end

    @property
    def digest(self) -> str:
        """Hash of the settings that decide the completions."""
        return hashlib.sha256(json.dumps(self.fingerprints, sort_keys=True, default=str).encode()).hexdigest()

    def export(self, folder: Path) -> None:
        """Write the student to `folder`, for a sampler that stops where this process does. Collective."""
        from mkd.checkpoint.hf.hf_writer import export_hf

        models = [(part, part.first_layer) for part in self.state.models]
        assets = replace(self.plan, trained_ends=()).assets
        export_hf(models, self.plan.student.shape, folder, context=self.engine.context, assets=assets)


class TextSource:
    """A source of completions."""

    settings: tuple[str, ...] = ()  # fields of `RolloutConfig` that not all sources read
    not_read: tuple[str, ...] = ()  # fields that all others read, and this one does not
    reads_prompts: bool = True  # --prompt-data-path has what the student completes

    def problems(self, config: Config) -> Iterable[UsageError]:
        """Yield what is wrong with its settings, if the run uses it."""
        return ()

    def build(self, parts: SourceParts) -> RolloutSource:
        """Return the source. Collective; the same error on every rank."""
        raise NotImplementedError
