"""Completions that a server samples in the background, many requests at the same time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mkd.errors import ServerAnswer
from mkd.kinds.sampled.sampler.rollouts import LENGTH, STOP, Request, Rollout, Sampling
from mkd.kinds.sampled.sampler.sampling import uniforms
from mkd.kinds.sampled.server.server_client import ServerClient

SEEDS = 2**31  # the server's seeds are below
LONG_LIST = 4096  # ids in a request


@dataclass
class SamplingJob:
    """The completions of one step. Threads ask the server; the caller polls."""

    client: ServerClient
    model: str
    version: str | None  # name of the weights that the server must have; None: its weights never change
    requests: Sequence[Request]
    sampling: Sampling
    iteration: int
    lag: int  # updates between the server's weights and those of the step
    limits: Mapping[str, Any]  # of the ids, see `limits_of`
    add: Callable[[Rollout], None]  # called by threads for each new completion
    done: dict[int, Rollout] = field(default_factory=dict)  # by place of the request; may begin filled
    _futures: list[Future[None]] = field(default_factory=list)
    _is_cancelled: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin to ask for the requests that are not done."""
        missing = [place for place in range(len(self.requests)) if place not in self.done]
        if not missing:
            return
        pool = ThreadPoolExecutor(min(self.sampling.slots, len(missing)), "rollouts")
        self._futures = [pool.submit(self._sample, place) for place in missing]
        pool.shutdown(wait=False)

    def poll(self, patience_s: float) -> bool:
        """Wait for at most so long; return True if all completions are here. Raises a thread's error."""
        finished, waiting = wait_for(self._futures, patience_s, return_when="FIRST_EXCEPTION")
        for one in finished:
            one.result()
        return not waiting

    def cancel(self) -> None:
        """Ask for nothing more."""
        self._is_cancelled.set()

    def _sample(self, place: int) -> None:
        if self._is_cancelled.is_set():
            return
        try:
            rollout = self._completion(self.requests[place])
        except BaseException:
            self.cancel()
            raise
        self.add(rollout)
        self.done[place] = rollout

    def _completion(self, request: Request) -> Rollout:
        sampling = self.sampling.after(len(request.ids))
        (number,) = uniforms(
            sampling.seed,
            self.iteration,
            prompts=np.array([request.prompt]),
            samples=np.array([request.sample]),
            positions=np.array([0]),
        )
        body: dict[str, Any] = dict(
            self.limits,
            model=self.model,
            prompt=request.ids.tolist(),
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=-1,
            min_p=0.0,
            n=1,
            seed=int(number * SEEDS),
            logprobs=0,
            return_token_ids=True,
            ignore_eos=True,  # the stop ids of the run decide alone
            stop_token_ids=sorted(sampling.stop_ids),
            skip_special_tokens=False,
        )
        answer = self.client.post("/v1/completions", body)
        self._check_version()
        return read_completion(answer, request, sampling, self.lag)

    def _check_version(self) -> None:
        """Raise ServerAnswer if the server has other weights by now: no completion of them is kept."""
        if self.version is None:
            return
        found = self.client.get("/weight_info").get("weight_version")
        if found != self.version:
            raise ServerAnswer(
                f"the rollout server has weights {found}, not {self.version}",
                "it was started again, or another run has exchanged them",
                "let no other run use the server, and start the same command again",
                code="rollout-server-weights",
            )


def limits_of(sampling: Sampling, num_rows: int) -> dict[str, Any]:
    """Return the parameters of a request that keep the server from ids that must not be sampled.

    The list of allowed ids is exact. A long one would be most of a request: then a bias makes the few others
    e^100 times less probable.
    """
    allowed = [one for one in range(sampling.vocab_size) if one not in sampling.unused_ids]
    if len(allowed) == num_rows:
        return {}
    if len(allowed) > LONG_LIST and num_rows - len(allowed) <= LONG_LIST:
        others = [*sorted(sampling.unused_ids), *range(sampling.vocab_size, num_rows)]
        return {"logit_bias": {str(one): -100.0 for one in others}}
    return {"allowed_token_ids": allowed}


def read_completion(answer: Mapping[str, Any], request: Request, sampling: Sampling, lag: int) -> Rollout:
    """Return the completion of an answer. Raises ServerAnswer for one that the run cannot train on."""
    try:
        (choice,) = answer["choices"]
        ids, finish = choice["token_ids"], choice["finish_reason"]
        logp = choice["logprobs"]["token_logprobs"]
        prompt = choice.get("prompt_token_ids")
    except (KeyError, TypeError, ValueError):
        ids = logp = prompt = finish = None
    if not ids or logp is None:
        raise wrong_answer("it has no token_ids with logprobs")
    if prompt is not None and prompt != request.ids.tolist():
        raise wrong_answer("it completes another prompt: its ids differ from those that were sent")
    if len(ids) != len(logp) or not all(one is not None and math.isfinite(one) for one in logp):
        raise wrong_answer(f"{len(ids)} ids have {len(logp)} log-probabilities, or some are not finite")
    unknown = [one for one in ids if not sampling.is_sampled(one)]
    if unknown:
        raise wrong_answer(
            f"{len(unknown)} of its {len(ids)} ids, such as {unknown[0]}, are not known tokens "
            f"(the run samples from the first {sampling.vocab_size})"
        )
    is_stopped = ids[-1] in sampling.stop_ids
    is_whole = len(ids) <= sampling.max_new_tokens and not set(ids[:-1]) & sampling.stop_ids
    if not is_whole or not (is_stopped or len(ids) == sampling.max_new_tokens):
        raise wrong_answer(
            f"its {len(ids)} tokens end neither at a stop token nor at --max-new-tokens ({finish})"
        )
    logp = np.array(logp, dtype=np.float32)
    return Rollout(request, np.array(ids, dtype=np.int64), logp, -logp, STOP if is_stopped else LENGTH, lag)


def wrong_answer(why: str) -> ServerAnswer:
    """Return the error for an answer that is not a completion of the request."""
    return ServerAnswer(
        "the rollout server's answer is not the completion that was asked for",
        why,
        "use a vLLM server of the student, with its tokenizer, started for this run",
        code="rollout-server-answer",
    )
