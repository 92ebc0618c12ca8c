"""Completions by a vLLM server that has the teacher's weights: ids in, ids out, many requests at a time."""

from __future__ import annotations

import hashlib
import logging
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mkd.chat.writer import Reader, reader_of
from mkd.checkpoint.hf.hf_hub import HUB_WEIGHTS, resolve_hf
from mkd.errors import ServerAnswer, ServerLost, UsageError
from mkd.generate.generate_job import Job
from mkd.generate.generate_settings import GenerateSettings, Server
from mkd.generate.selection import Index
from mkd.human import counted
from mkd.kinds.sampled.sampler.rollouts import Request, Rollout, Sampling
from mkd.kinds.sampled.server.sampling_job import SamplingJob, limits_of
from mkd.kinds.sampled.server.server_client import TOKEN, Refused, ServerClient
from mkd.kinds.sampled.server.server_setup import check_tokenizer
from mkd.plan.checks.model_alone import ModelAlone
from mkd.plan.models.model_shape import ModelShape
from mkd.resolve.model_source import ModelSource
from mkd.run.one_model import ModelPlan
from mkd.tokenizers.load import open_tokenizer

LOG = logging.getLogger("mkd")
SMALL_FILES = tuple(one for one in HUB_WEIGHTS if "safetensors" not in one)
POLL_S, LINE_S = 0.5, 30.0
WINDOW = 4096  # requests of which the finished ones are kept in memory


@dataclass(frozen=True)
class ServedReader(Reader):
    """The teacher's tokenizer and sizes from its folder; its weights are on the server."""

    client: ServerClient
    name: str  # of the model on the server
    served_length: int  # tokens that the server takes

    @property
    def context_length(self) -> int:
        return min(self.source.shape.max_position_embeddings, self.served_length)

    @property
    def fingerprint(self) -> str:
        """Name on the server, and hash of the folder's config.json: a server does not show its weights."""
        config = (self.source.assets / "config.json").read_bytes()
        return f"{self.name} sha256:{hashlib.sha256(config).hexdigest()}"

    def describe(self) -> str:
        return f"{self.name} on {self.client.url} (context of {self.context_length} tokens)"


def served_teacher(settings: GenerateSettings) -> ServedReader:
    """Find the server and read the teacher's small files.

    Raises UsageError if the server does not have this teacher.
    """
    assert settings.server is not None, "there is a server"
    config = settings.config(is_cuda=False)
    (teacher,) = config.teachers
    if teacher.hf is None:
        what, why = f"--teacher {settings.teacher} is a checkpoint", "a server reads Hugging Face folders"
        do = "export it with `mkd export`, and serve that"
        raise UsageError(what, why, do, code="value-not-valid")
    folder = resolve_hf(teacher.hf, SMALL_FILES)
    shape = ModelShape.from_hf_dir(folder)
    plan = ModelPlan(ModelAlone(config, 1, shape, teacher=0), ModelSource(shape, folder, None, None))
    reader = reader_of("teacher", plan, open_tokenizer(folder, settings.chat))
    client = ServerClient(settings.server.url.rstrip("/"), settings.server.timeout_s)
    name, longest = _find(client, settings.server, shape.max_position_embeddings)
    check_tokenizer(client, name, reader.tokenizer, "teacher")
    return ServedReader(reader.role, plan, reader.tokenizer, reader.stops, client, name, longest)


def _find(client: ServerClient, server: Server, longest: int) -> tuple[str, int]:
    """Return (name of the model on the server, tokens that it takes). Raises UsageError."""
    start = "start it with: vllm serve TEACHER --port PORT"
    try:
        models = {one["id"]: one for one in client.get("/v1/models")["data"]}
    except ServerLost as error:
        what = f"there is no server at {client.url}"
        raise UsageError(what, error.what, start, code="rollout-server-not-ready") from None
    except (Refused, KeyError, TypeError) as error:
        if isinstance(error, Refused) and error.status in (401, 403):
            what, do = f"the server {client.url} refuses the token", f"set {TOKEN} to its --api-key"
            raise UsageError(what, str(error), do, code="rollout-server-token") from None
        what = f"{client.url} does not answer as an OpenAI-compatible server"
        raise UsageError(what, str(error), start, code="rollout-server-not-ready") from None
    name = server.model
    if name is None and len(models) == 1:
        (name,) = models
    if name is None or name not in models:
        named = f"not {name}" if name else "and none is chosen"
        what = f"the server {client.url} has the models {', '.join(models) or 'none'}, {named}"
        do = "name one of them: --server-model NAME"
        raise UsageError(what, "it must have the teacher", do, code="rollout-server-not-ready")
    return name, models[name].get("max_model_len") or longest


def run_served(job: Job, reader: ServedReader) -> None:
    """Ask for what is missing, then select and write. Raises ServerLost and ServerAnswer."""
    calls = job.reward_calls()
    if calls is not None:
        calls.start()
    index = Index.read(job.folder.path)
    if index.known:
        LOG.info(f"{counted(len(index.known), 'completion')} of an earlier start are kept")
    begin, tokens = time.perf_counter(), 0
    judge = job.judge(calls, 0)
    try:
        job.judge_again(index, judge)
        for rollout in _completed(reader, job.missing(index), reader.sampling(job.settings.generation)):
            tokens += len(rollout.ids)
            job.add(rollout, judge)
        judge.close()
    finally:
        judge.stop()
    job.finish([(tokens, time.perf_counter() - begin)])


def _completed(reader: ServedReader, requests: Sequence[Request], sampling: Sampling) -> Iterator[Rollout]:
    """Yield completions as they arrive. A line tells the progress now and then."""
    shown, done = time.perf_counter(), 0
    for first in range(0, len(requests), WINDOW):
        arrived: queue.Queue[Rollout] = queue.Queue()
        asked = SamplingJob(
            client=reader.client,
            model=reader.name,
            version=None,
            requests=requests[first : first + WINDOW],
            sampling=sampling,
            iteration=0,
            lag=0,
            limits=limits_of(sampling, reader.source.shape.vocab_size),
            add=arrived.put,
        )
        asked.start()
        try:
            is_over = False
            while not is_over:
                is_over = _poll(asked)
                while not arrived.empty():
                    done += 1
                    yield arrived.get()
                if time.perf_counter() - shown > LINE_S:
                    shown = time.perf_counter()
                    LOG.info(f"{done:,} of {counted(len(requests), 'completion')}")
        finally:
            asked.cancel()


def _poll(asked: SamplingJob) -> bool:
    """Return True if all completions are here. Raises ServerLost and ServerAnswer."""
    try:
        return asked.poll(POLL_S)
    except Refused as error:
        what, do = "the server refuses a request", "use a vLLM server of the teacher"
        raise ServerAnswer(what, str(error), do, code="rollout-server-answer") from error
