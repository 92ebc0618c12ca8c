"""Completions from a vLLM server that gets the student's weights before it samples."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mkd.errors import MkdError, ServerAnswer, ServerLost
from mkd.kinds.sampled.sampler.rollouts import Request, Rollout, Sampling
from mkd.kinds.sampled.server.rollout_record import RolloutRecord
from mkd.kinds.sampled.server.sampling_job import SamplingJob, limits_of
from mkd.kinds.sampled.server.server_client import Refused, ServerClient
from mkd.kinds.sampled.server.server_probe import Scores, check_refit, sample_probe, score, server_scores
from mkd.models.language_model import LanguageModel
from mkd.parallel.context import ParallelContext

POLL_S = 2.0  # between signs of life while the server samples
T = TypeVar("T")


@dataclass
class ServerSource:
    """Samples on a server. Rank 0 asks it; the others wait for the outcome.

    The server has the weights of version v after v updates of the student. Step i trains on completions of
    version i - 1, or of i - 2 with a staleness of 1: then the server samples for step i + 1 while i trains.
    """

    parts: Sequence[LanguageModel]  # of this rank, by virtual stage
    context: ParallelContext
    sampling: Sampling
    parameters_gathered: Callable[[], AbstractContextManager[None]]  # all weights are here inside of it
    export: Callable[[Path], None]  # writes the student as a Hugging Face folder; collective
    client: ServerClient
    model: str  # its name on the server
    folder: Path  # for weights, on a file system that the server sees
    run_id: str  # begins the name of each version, so that no other run's weights are taken for ours
    max_staleness: int
    num_rows: int  # ids that the server's probabilities are over: all of the student
    record: RolloutRecord | None  # None: the run saves nothing
    _version: int | None = None  # of the server's weights; None: unknown
    _ahead: int | None = None  # step whose completions are being sampled
    _job: SamplingJob | None = None  # on rank 0
    _probe: list[Rollout] = field(default_factory=list)
    _scores: Scores | None = None  # of the probe at the last exchange, on rank 0

    def sample(
        self,
        requests: Sequence[Request],
        iteration: int,
        progress: Callable[[int], None],
        following: Sequence[Request] = (),
    ) -> list[Rollout]:
        """Return all completions, equal on all ranks. Collective.

        Raises ServerLost if the server is gone and ServerAnswer if it is another one, on every rank.
        """
        if self._ahead != iteration:
            self._begin(requests, iteration, iteration - 1)
        rollouts = self._collect(progress)
        self._ahead = None
        if following and self.max_staleness:
            self._begin(following, iteration + 1, iteration - 1)
        return rollouts

    def _begin(self, requests: Sequence[Request], iteration: int, version: int) -> None:
        """Let the server sample what is not recorded, with the weights of `version`. Collective."""
        found = self._on_rank_0(lambda: self.record.open(iteration, requests) if self.record else {}) or {}
        if self.context.broadcast_object(len(found) < len(requests)):
            self._refit(version, requests)
        self._ahead = iteration
        if self.context.rank == 0:
            self._job = SamplingJob(
                client=self.client,
                model=self.model,
                version=self._name(version),
                requests=requests,
                sampling=self.sampling,
                iteration=iteration,
                lag=iteration - 1 - version,
                limits=limits_of(self.sampling, self.num_rows),
                add=self._adder(version),
                done=found,
            )
            self._job.start()

    def _adder(self, version: int) -> Callable[[Rollout], None]:
        record = self.record
        return (lambda rollout: record.add(rollout, version)) if record else lambda rollout: None

    def _collect(self, progress: Callable[[int], None]) -> list[Rollout]:
        """Return the completions of the job. Collective; every rank hears of progress."""
        while True:
            ready = self.context.broadcast_object(self._on_rank_0(self._poll))
            assert ready is not None
            done, rollouts = ready
            progress(done)
            if rollouts is not None:
                return rollouts

    def _poll(self) -> tuple[int, list[Rollout] | None]:
        job = self._job
        assert job is not None, "rank 0 has the job"
        if not job.poll(POLL_S):
            return len(job.done), None
        if self.record:
            self.record.close()  # before the step trains on them
        return len(job.done), [job.done[place] for place in range(len(job.requests))]

    def _refit(self, version: int, requests: Sequence[Request]) -> None:
        """Give the server the weights after `version` updates, which are those of now. Collective."""
        if self._version == version:
            return
        path = self.folder / f"step_{version:07d}"
        with self.parameters_gathered():
            self.export(path)
            self._probe = self._probe or sample_probe(self.parts, self.context, requests, self.sampling)
            ours = score(self.parts, self.context, self._probe, self.num_rows)
        self._on_rank_0(lambda: self._exchange(path, version, ours))
        self._version = version

    def _exchange(self, path: Path, version: int, ours: Any) -> None:
        """Let the server read the weights, and verify that it has."""
        client = self.client
        client.post("/pause?mode=wait")
        try:
            arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(path.resolve())}}
            client.post("/collective_rpc", arguments)
            client.post("/reset_prefix_cache")
            client.post("/update_weight_version", {"new_version": self._name(version)})
        except (ServerLost, Refused) as error:
            with contextlib.suppress(ServerLost, Refused):
                client.post("/resume")
                client.get("/health")
                raise ServerAnswer(
                    f"the rollout server cannot read the student's weights in {path}",
                    str(error),
                    "start it with the student's folder, and let it see this path",
                    code="rollout-server-weights",
                ) from error
            raise
        client.post("/resume")
        new = Scores(ours, server_scores(client, self.model, self._probe))
        check_refit(self._scores, new, next(self.parts[0].parameters()).dtype, version)
        self._scores = new
        for other in self.folder.glob("step_*"):
            if other != path:
                shutil.rmtree(other, ignore_errors=True)

    def _name(self, version: int) -> str:
        return f"{self.run_id}-{version}"

    def _on_rank_0(self, action: Callable[[], T]) -> T | None:
        """Return the result of `action` on rank 0, None elsewhere. Collective.

        Every rank raises its error.
        """
        result: T | None = None
        problem: MkdError | None = None
        if self.context.rank == 0:
            try:
                result = action()
            except MkdError as error:
                problem = error
            except Refused as error:
                problem = ServerAnswer(
                    "the rollout server refuses a request",
                    str(error),
                    "use a vLLM server of the student, with the protocol of vLLM 0.32",
                    code="rollout-server-answer",
                )
        problem = self.context.broadcast_object(problem)
        if problem is not None:
            problem.on_all_ranks = True
            if self._job is not None:
                self._job.cancel()
            raise problem
        return result
