"""Signs of life of all processes of a launch with several sides, and the first reason why it ends.

A process that is stopped, or whose machine or network is gone, breaks no connection: the other side would
wait for it without end. So a thread of every process posts a count at the store of the launch twice a second,
and the first process of each side reads those of the other sides. The reason why the launch ends is at the
store as well. The first one that is written there stays, so that all processes report the same.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from mkd.operations.failures import Failure
from mkd.operations.phases import INIT, READING
from mkd.operations.signals import Signals
from mkd.parallel.start_store import AGENT_STORE

BEAT_S = 0.5
SILENT_S = 20.0  # without a sign of life: a host with load 20 starved a limit of 3 s
LOADING_S = 120.0  # the same during the start, when a library may hold the interpreter while it reads weights
PAUSED_S = 5.0  # between two looks of a reader: it was paused itself, and cannot judge the others
POST_S = 2.0  # to post a reason, before the process ends without it
GOODBYE_S = 10.0  # to say goodbye: whoever ends well without it keeps others waiting
LINGER_S = 8.0  # how long the host of the store waits for the goodbyes of the others after a failure
STALE_S = 5.0  # a reason this much older than the start of this process is of an earlier start
REASON = "reason"
GONE = "goodbye"  # phase of a process that has ended, with or without an error


@dataclass
class Heartbeat:
    """This process's signs of life, what it knows of the others, and the first reason to end.

    Every attribute without an underscore may be read from any thread.
    """

    store: dist.Store  # a client for this alone: another one may block while it waits for a key
    rank: int
    size: int
    others: tuple[int, ...]  # ranks whose signs of life this process reads
    phase: Callable[[], str] = lambda: ""  # what this process is doing
    signals: Signals | None = None
    obeys: bool = False  # a signal to one of `others` counts as one to this process
    limit_s: float = SILENT_S
    figures: dict[str, float] = field(default_factory=dict)  # posted with every beat
    first: Failure | None = None  # the first reason why the launch ends
    said: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # the latest of every one of `others`
    missed: frozenset[int] = frozenset()  # ranks whose process is gone, as somebody has seen
    dead: frozenset[int] = frozenset()  # those of `missed` that did not say goodbye
    lost: str = ""  # what the store answered when it broke
    hosts_store: bool = field(default_factory=lambda: os.environ.get(AGENT_STORE) != str(True))
    _begun: float = field(default_factory=time.time)  # s since the epoch
    _answered: float = field(default_factory=time.monotonic)  # when the store answered last
    _looked: float = field(default_factory=time.monotonic)
    _since: dict[int, float] = field(default_factory=dict)  # when each count changed, as this reader sees it
    _watched: float = field(default_factory=time.monotonic)  # the latest `silence`
    _count: int = 0
    _to_post: Failure | None = None
    _is_over: bool = False
    _wake: threading.Event = field(default_factory=threading.Event)
    _posted: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> Heartbeat:
        """Post from now on."""
        self.store = dist.PrefixStore("mkd/heartbeat", self.store)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def beat(self) -> None:
        """Post now, or soon."""
        self._wake.set()

    def post(self, failure: Failure) -> Failure:
        """Write why this process ends. Return the first reason of the launch: this one, or an earlier one."""
        if self.first is None and self._thread is not None and not self._ended.is_set():
            self._posted.clear()
            self._to_post = failure
            self._wake.set()
            self._posted.wait(POST_S)
        return self.first or failure

    def close(self) -> None:
        """Say goodbye: from now on nobody misses this process. Rank 0 waits a little, if it has the store."""
        if self._thread is None or self._is_over:
            return
        self._is_over = True
        self._wake.set()
        patience_s = POST_S if self.first is not None or self.lost else GOODBYE_S
        self._ended.wait(patience_s + (self._linger_s if self.rank == 0 and self.hosts_store else 0))

    def silence(self) -> Failure | None:
        """Return the failure of a process that has given no sign of life for too long; None if there is none.

        The store itself may be silent. Only the watchdog's thread calls it.
        """
        now = time.monotonic()
        if now - self._watched > PAUSED_S:  # this process did not run, so nothing can be said yet
            self._answered = now
        self._watched = now
        if self.lost or now - self._answered > self.limit_s:
            failure = self._failure(0, self._of_store())
            self.lost = self.lost or "no answer"
            return failure
        found = sorted(self._since.items())
        silent = [rank for rank, since in found if self._looked - since > self._limit_s(rank)]
        if not silent:
            return None
        more = f" (nor did ranks {', '.join(map(str, silent[1:]))})" if silent[1:] else ""
        what = f"it gave no sign of life for {self._limit_s(silent[0]):g} s{more}"
        return self._failure(silent[0], f"{what}: stopped, or its machine or network is gone")

    def _of_store(self) -> str:
        host = "it hosts" if self.hosts_store else "the launcher of its machine hosts"
        how = "is gone" if self.lost else f"did not answer for {self.limit_s:g} s"
        return f"the store of the launch, which {host}, {how}: stopped, or its machine or network is gone"

    def _failure(self, rank: int, what: str) -> Failure:
        return Failure(rank, time.time(), 1, what, "")

    def _limit_s(self, rank: int) -> float:
        is_loading = self.said.get(rank, {}).get("phase", INIT) in (INIT, READING)
        return self.limit_s * LOADING_S / SILENT_S if is_loading else self.limit_s

    def _run(self) -> None:
        try:
            self._since = {rank: time.monotonic() for rank in self.others}
            while not self._is_over:
                self._beat(self.phase())
                self._wake.wait(BEAT_S)
                self._wake.clear()
            self._beat(GONE)
            self._linger()
        except (dist.DistError, RuntimeError) as error:  # the store is gone, with its process or machine
            self.lost = (str(error).splitlines() or ["no message"])[0]
        finally:
            self._posted.set()
            self._ended.set()

    def _beat(self, phase: str) -> None:
        self._count += 1
        received = self.signals.received if self.signals is not None else 0
        said = {"count": self._count, "phase": phase, "signal": received, **self.figures}
        self.store.set(str(self.rank), json.dumps(said))
        if self._to_post is not None:
            self._write_reason(self._to_post)
            self._to_post = None
            self._posted.set()
        elif self.first is None:
            self.first = self._reason()
        self._look()
        if self.missed - self.dead:
            said = self._read(sorted(self.missed))
            self.dead = frozenset(one for one in self.missed if said.get(one, {}).get("phase") != GONE)
        self._answered = time.monotonic()

    def _look(self) -> None:
        """Read what the others say. If this process was paused, its measurements start over."""
        now, since, said = time.monotonic(), dict(self._since), self._read(self.others)
        for rank, one in said.items():
            if one["phase"] == GONE:
                since.pop(rank, None)
            elif one != self.said.get(rank):
                since[rank] = now
            if self.obeys and self.signals is not None and one["signal"]:
                self.signals.passed_on(one["signal"], rank)
        if now - self._looked > PAUSED_S:
            since = dict.fromkeys(since, now)
        self._looked, self._since = now, since  # another thread reads them
        self.said = said

    def _read(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        keys = {rank: str(rank) for rank in ranks}
        if not self.store.check([*keys.values()]):  # some have not begun
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        texts = self.store.multi_get([*keys.values()]) if keys else []
        return {rank: json.loads(text) for rank, text in zip(keys, texts, strict=True)}

    def _write_reason(self, failure: Failure) -> None:
        """Write the failure, unless there is a reason already; remember the one that is there then."""
        self.first = self._reason()
        if self.first is None:
            earlier = self.store.get(REASON).decode() if self.store.check([REASON]) else ""
            found = self.store.compare_set(REASON, earlier, json.dumps(asdict(failure)))
            self.first = Failure(**json.loads(found))

    def _reason(self) -> Failure | None:
        """Return the reason at the store; None if there is none, or only that of an earlier start."""
        if not self.store.check([REASON]):
            return None
        found = Failure(**json.loads(self.store.get(REASON)))
        return found if found.time > self._begun - STALE_S else None

    @property
    def _linger_s(self) -> float:
        return self.limit_s if self.first is None else LINGER_S

    def _linger(self) -> None:
        """As the host of the store, wait for the goodbyes of the others."""
        deadline = time.monotonic() + self._linger_s
        while self.rank == 0 and self.hosts_store and time.monotonic() < deadline:
            silent = self.dead if self.first is None else self.dead | {self.first.rank}
            left = set(range(self.size)) - silent - {self.rank}
            said = self._read(sorted(left))
            if len(said) == len(left) and all(one["phase"] == GONE for one in said.values()):
                return
            time.sleep(BEAT_S / 10)
