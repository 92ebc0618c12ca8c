"""Settings of generated data, and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mkd.chat.generation import Generation
from mkd.chat.named_model import teacher_named
from mkd.config.schema import Config, ParallelConfig, TrainingConfig
from mkd.errors import MkdError, UsageError
from mkd.plan.checks.no_effect import no_effect
from mkd.tokenizers.chat_input import ChatSettings

REWARD = re.compile(r"[\w.]+:\w+")
SUFFIX = ".jsonl"
MAX_FAILED_REWARDS, REWARD_TIMEOUT_S = 0, 10.0
SERVER_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Layout:
    """Processes that share one copy of the teacher. The other processes hold further copies."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1  # processes that share the experts of a layer


@dataclass(frozen=True)
class Server:
    """A vLLM server that has the teacher's weights."""

    url: str
    model: str | None = None  # its name there; None: the only one
    timeout_s: float = SERVER_TIMEOUT_S


@dataclass(frozen=True)
class Filter:
    """Choice of the completions that become records."""

    reward: str | None = None  # module:function
    reward_timeout_s: float = REWARD_TIMEOUT_S
    max_failed: int = MAX_FAILED_REWARDS  # completions whose reward may fail
    min_reward: float | None = None  # lower ones are dropped
    keep_best: int | None = None  # of the completions of a prompt
    truncated: str = "drop"  # or "keep": completions that were cut off

    def problems(self, samples: int) -> Iterator[MkdError]:
        """Yield an error for every setting that cannot work with so many samples of a prompt."""
        if self.reward is not None and not REWARD.fullmatch(self.reward):
            what, why = f"--reward {self.reward!r} is not module:function", "it is imported by this name"
            yield UsageError(what, why, "write it as my_rewards:exact", code="value-not-valid")
        given = {
            "--min-reward": self.min_reward is not None,
            "--keep-best": self.keep_best is not None,
            "--max-failed-rewards": self.max_failed != MAX_FAILED_REWARDS,
            "--reward-timeout-s": self.reward_timeout_s != REWARD_TIMEOUT_S,
        }
        for flag in (flag for flag, is_given in given.items() if is_given and self.reward is None):
            yield no_effect(flag, "no function judges the completions", "add --reward module:function")
        if not 0 < self.reward_timeout_s < float("inf"):
            what = f"--reward-timeout-s is {self.reward_timeout_s:g}"
            yield UsageError(what, "", "give a number above 0", code="out-of-range")
        if self.min_reward is not None and not abs(self.min_reward) < float("inf"):
            what = f"--min-reward is {self.min_reward}"
            yield UsageError(what, "no reward compares with it", "give a finite number", code="out-of-range")
        if self.keep_best is not None and self.keep_best >= samples:
            what = f"--keep-best {self.keep_best} with --samples-per-prompt {samples}"
            why = "it chooses the best completions of a prompt among several"
            yield UsageError(what, why, "raise --samples-per-prompt", code="numbers-contradict")


@dataclass(frozen=True)
class GenerateSettings:
    """A job that lets a teacher write data."""

    teacher: str  # folder or hub id
    prompts: tuple[str, ...]  # paths as of --data-path
    out: Path
    generation: Generation
    filter: Filter = Filter()
    chat: ChatSettings = ChatSettings()
    system: str | None = None
    as_chat: bool = False  # texts become messages of a user
    dtype: str | None = None  # bf16 or fp32; None: bf16 on a GPU, else fp32
    layout: Layout = Layout()
    server: Server | None = None  # None: the processes of the job sample
    max_bad_records: int = 0  # of each file
    overwrite: bool = False
    dry_run: bool = False

    def config(self, is_cuda: bool) -> Config:
        """Return the configuration in which the teacher runs alone. Raises CheckpointError."""
        layout = self.layout
        return Config(
            teachers=(teacher_named(self.teacher),),
            parallel=ParallelConfig(
                tensor_model_parallel_size=layout.tensor,
                sequence_parallel=layout.tensor > 1,  # a teacher with experts has to be
                pipeline_model_parallel_size=layout.pipeline,
                expert_model_parallel_size=layout.expert,
            ),
            training=TrainingConfig(bf16=self.dtype == "bf16" if self.dtype else is_cuda),
        )

    def problems(self) -> list[MkdError]:
        """Return an error for every setting that cannot work."""
        found = [*self.generation.problems(), *self.filter.problems(self.generation.samples)]
        if self.out.suffix != SUFFIX:
            what, why = f"--out {self.out} does not end in {SUFFIX}", "its name says how it is read"
            found.append(UsageError(what, why, f"name it {self.out.stem}{SUFFIX}", code="value-not-valid"))
        if self.server is not None:
            found += self._server_problems(self.server)
        return found

    def _server_problems(self, server: Server) -> Iterator[MkdError]:
        """Yield settings of processes, which a server does not read."""
        if not server.timeout_s > 0:
            what = f"--server-timeout-s is {server.timeout_s:g}"
            yield UsageError(what, "", "give a number above 0", code="out-of-range")
        given = {f"--{name}-model-parallel-size": size != 1 for name, size in asdict(self.layout).items()}
        given["--dtype"] = self.dtype is not None
        for flag in (flag for flag, is_given in given.items() if is_given):
            yield no_effect(flag, "the server at --server-url has the teacher", "remove it")
