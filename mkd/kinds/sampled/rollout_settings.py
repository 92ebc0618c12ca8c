"""The settings of training on the student's own text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mkd.config.field import ABOVE_0, option

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "in-process": "mkd.kinds.sampled.sources.in_process:InProcess",
        "server": "mkd.kinds.sampled.sources.vllm_server:VllmServer",
        "records": "mkd.kinds.sampled.sources.agent_records:AgentRecords",
    }
)
"""Value of --rollout-source -> its `TextSource`, loaded by `known_sources`."""


@dataclass(frozen=True)
class RolloutConfig:
    """Completions that the student samples in every step, and that the teachers then judge."""

    on_policy_fraction: float = option(
        0.0,
        "fraction of --global-batch-size that the student's own completions replace, 0 to 1. At 1 a step "
        "reads prompts only, and --data-path is not needed. Needs --kd-ratio 1",
    )
    prompt_data_path: tuple[str, ...] = option(
        (),
        "prompts: paths as of --data-path, with records that have prompt or messages. A last "
        "assistant message is left out (required with --on-policy-fraction)",
    )
    rollout_prompts: int | None = option(
        None,
        "prompts of one step (default: --on-policy-fraction x --global-batch-size / --samples-per-prompt, "
        "rounded)",
    )
    samples_per_prompt: int = option(1, "completions that are sampled for every prompt")
    max_new_tokens: int = option(
        256, "tokens of a completion, at most. A prompt must leave that many of --seq-length"
    )
    rollout_temperature: float = option(
        1.0, "sampling temperature. Above or below 1 the text does not follow the student's own distribution"
    )
    rollout_slots: int = option(
        32,
        "completions that a data-parallel replica samples at the same time. Raise it while memory for keys "
        "and values allows",
    )
    rollout_source: str = option(
        "in-process",
        "sampler of completions. in-process: the training model itself. server: a vLLM server, which gets "
        "the weights of every step through files. records: another process, which writes records of agents "
        "with these weights while the run trains",
        choices=tuple(SOURCES),
    )
    rollout_server_url: str | None = option(
        None, "address of the server, http://127.0.0.1:PORT (required with --rollout-source server)"
    )
    rollout_server_remote: bool = option(
        False,
        "allow a server on another machine. Its requests that exchange weights run code: use a network that "
        "nobody else reaches",
    )
    rollout_server_timeout_s: float = option(
        600.0, "seconds until a request to the server counts as failed. mkd then tries it three times more"
    )
    rollout_records: str | None = option(
        None,
        "folder of the records of agents, and of progress.json, which tells their writer how far the run is "
        "(required with --rollout-source records)",
    )
    rollout_records_timeout_s: float = option(
        1800.0,
        "seconds without a new record after which a run that waits for some saves and ends",
        valid=ABOVE_0,
    )
    max_staleness: int = option(
        0,
        "updates that completions may lag behind. Of a server 0 or 1: with 1 it samples for the next step "
        "while this one trains. Records that lag further are skipped",
    )
    rollout_truncated: str = option(
        "keep",
        "treatment of completions that reach --max-new-tokens without a stop token: keep them in the loss, "
        "or drop them",
        choices=("keep", "drop"),
    )

    @property
    def is_on(self) -> bool:
        """True if the student's own text takes part in training."""
        return self.on_policy_fraction > 0

    @property
    def samples_here(self) -> bool:
        """True if the training processes sample."""
        return self.is_on and self.rollout_source == "in-process"
