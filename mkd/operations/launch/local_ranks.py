"""Start the ranks of a command on this machine, as torchrun would, and return the first failure's exit code.

torch's elastic agent starts and watches them in a thread. Signals stay in the main thread, which forwards
each to every rank and lets the ranks decide: they save, and end with 75. torchrun itself would kill them
after a time limit and turn every exit code into 1.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mkd.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, UsageError
from mkd.operations.signals import SIGNALS
from mkd.parent_process import LAUNCHER

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE")
CAUSE_S = 2.0
"""A rank that was killed is taken for the cause of failures that others report up to this much earlier."""

ENVIRONMENT: Mapping[str, str] = MappingProxyType(  # why: launch/env.sh, which has the same values
    {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NCCL_DEBUG": "WARN",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300",
    }
)
"""Environment variables of every rank, each unless it is set already."""


def is_started_by_launcher(environment: Mapping[str, str] = MappingProxyType(os.environ)) -> bool:
    """Return True if torchrun, Slurm's srun or mpirun has started this process as one of several."""
    is_slurm_task = "SLURM_STEP_ID" in environment and environment.get("SLURM_NTASKS", "1") != "1"
    return is_slurm_task or any(name in environment for name in RANK_VARIABLES)


def ranks_given_twice(flag: str) -> UsageError:
    """Return the error for a number of ranks that a process of a launcher gets as `flag`."""
    error = UsageError(
        f"{flag} is given to one of several ranks",
        "torchrun or Slurm has started them already",
        f"leave {flag} out, or start mkd without a launcher",
        code="remove-flag",
    )
    error.on_all_ranks = True
    return error


def visible_gpus() -> int:
    """Return the number of GPUs that torch can use here. Import torch only if there are NVIDIA devices."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return 0
    if not any(name[6:].isdecimal() for name in os.listdir("/dev") if name.startswith("nvidia")):
        return 0
    import torch

    return torch.cuda.device_count()


def forwarded_signals() -> list[signal.Signals]:
    """Return the signals to forward: those of `FORWARDED` that this process may catch.

    One that is ignored stays so, also in the ranks: `nohup` ignores SIGHUP to protect a run. The signals
    that a run always catches are forwarded even then, because a shell script starts `mkd train &` with
    SIGINT ignored.
    """
    return [one for one in FORWARDED if one in SIGNALS or signal.getsignal(one) is not signal.SIG_IGN]


def run_ranks(command: Sequence[str], num_ranks: int) -> int:
    """Run `command` (program and arguments) as `num_ranks` ranks of this machine. Return the exit code.

    That is 0 if all ranks end well, else the one of the rank that failed first: 128 + N if signal N killed
    it, as in a shell. Call it in the main thread.
    """
    with tempfile.TemporaryDirectory(prefix="mkd-ranks-") as reports, _environment(num_ranks):
        agent = _build_agent(command, num_ranks, reports)
        _silence_agent()
        run = _AgentRun(agent)
        with run.signals_forwarded():
            run.wait()
        if run.error is not None:
            raise run.error
        return _exit_code(run)


@dataclass
class _AgentRun:
    """An elastic agent that runs in a thread, and the signals that this process has received meanwhile."""

    agent: Any  # LocalElasticAgent
    received: list[int] = field(default_factory=list)
    result: Any = None  # RunResult
    error: BaseException | None = None
    _num_sent: int = 0
    _is_over: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Run the agent until its ranks have ended."""
        thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        thread.start()
        while not self._is_over.is_set() and not self._pids():
            time.sleep(0.02)
        self._forward()  # what came before there was a rank
        self._is_over.wait()  # Python runs the handlers of signals meanwhile
        thread.join()

    @contextmanager
    def signals_forwarded(self) -> Iterator[None]:
        """Forward signals to the ranks inside the block instead of ending this process."""

        def catch(number: int, frame: Any) -> None:
            self.received.append(number)
            self._forward()

        earlier = {number: signal.signal(number, catch) for number in forwarded_signals()}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _run(self) -> None:
        try:
            self.result = self.agent.run()
        except BaseException as error:  # raised again in the main thread
            self.error = error
        finally:
            self._is_over.set()

    def _pids(self) -> list[int]:
        workers = self.agent.get_worker_group().workers
        return [worker.id for worker in workers if isinstance(worker.id, int)]

    def _forward(self) -> None:
        pids = self._pids()
        while pids and self._num_sent < len(self.received):
            number = self.received[self._num_sent]
            self._num_sent += 1
            for pid in pids:
                with suppress(ProcessLookupError):  # it has ended
                    os.kill(pid, number)


def _build_agent(command: Sequence[str], num_ranks: int, reports: str) -> Any:
    """Build the agent that torchrun --standalone would use: its store is on a free port of this machine."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    where = RendezvousParameters(
        "c10d", "localhost:0", uuid.uuid4().hex, min_nodes=1, max_nodes=1, local_addr="localhost"
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=num_ranks,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=get_rendezvous_handler(where),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="localhost",
    )
    return LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(log_dir=reports))


def _silence_agent() -> None:
    """Keep torch's lines about its own processes off the terminal: the ranks say why they end."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _environment(num_ranks: int) -> Iterator[None]:
    """Set the variables of the ranks inside the block."""
    here = str(Path(__file__).resolve().parents[3])  # a checkout is not installed
    on_path = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    has_gpus = visible_gpus() > 0
    threads = 1 if has_gpus else max(1, len(os.sched_getaffinity(0)) // num_ranks)
    own = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(on_path)), LAUNCHER: str(os.getpid())}
    defaults = {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    own |= {name: value for name, value in defaults.items() if name not in os.environ}
    earlier = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in earlier.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _exit_code(run: _AgentRun) -> int:
    """Return the exit code of the rank that failed first. Say so if a signal killed it."""
    if run.result is None or not run.result.is_failed():
        return EXIT_DONE
    failures = run.result.failures

    def when(rank: int) -> float:
        """Time of the failure, s. The agent ends the other ranks with SIGTERM, so that is never the cause."""
        code = failures[rank].exitcode
        shift = 0 if code >= 0 else 1 if code == -signal.SIGTERM else -1
        return failures[rank].timestamp + CAUSE_S * shift

    first = min(failures, key=when)  # of several in the same second the one that the agent has seen first
    code = failures[first].exitcode
    if code >= 0:
        return code
    if -code in run.received:  # before the rank could catch it: there is nothing to save
        return EXIT_INTERRUPTED if -code == signal.SIGINT else EXIT_PREEMPTED
    memory = "; the system kills processes if memory runs out" if -code == signal.SIGKILL else ""
    print(f"rank {first} was ended by {signal.Signals(-code).name}{memory}", file=sys.stderr, flush=True)
    return 128 - code
