"""Completions of a vLLM server, which gets the weights of every step."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mkd.config.schema import Config, RolloutConfig
from mkd.errors import UsageError
from mkd.kinds.sampled.sources.text_source import SourceParts, TextSource

if TYPE_CHECKING:  # it loads torch
    from mkd.kinds.sampled.server.server_source import ServerSource


class VllmServer(TextSource):
    """A vLLM server."""

    settings = ("rollout_server_url", "rollout_server_remote", "rollout_server_timeout_s", "max_staleness")

    def problems(self, config: Config) -> Iterator[UsageError]:
        yield from _address(config.rollout)
        yield from _staleness(config)

    def build(self, parts: SourceParts) -> ServerSource:
        from mkd.kinds.sampled.server.server_setup import build_server_source

        return build_server_source(parts)


def _address(rollout: RolloutConfig) -> Iterator[UsageError]:
    url = rollout.rollout_server_url
    if url is None:
        what, do = "rollout-source is server, but there is no address", "give --rollout-server-url URL"
        yield UsageError(what, "mkd does not start servers", do, code="add-flag")
    else:
        names = "rollout-server-url", "rollout-server-remote"
        yield from address_problems(url, rollout.rollout_server_remote, *names)


def address_problems(url: str, may_be_remote: bool, setting: str, remote: str) -> Iterator[UsageError]:
    """Yield what is wrong with the address in `setting`; the setting `remote` allows another machine."""
    host = _host(url)
    if host is None:
        what, why = f"{setting} {url} is not an address", "a scheme, a host and a port are needed"
        yield UsageError(what, why, "write it as http://127.0.0.1:8000", code="value-not-valid")
    elif not (may_be_remote or _is_loopback(host)):
        what = f"{setting} {url} is not on this machine"
        why = "whoever reaches such a server can run code on it, and its answers become training data"
        do = f"use http://127.0.0.1:PORT, or add --{remote}"
        yield UsageError(what, why, do, code="rollout-server-not-loopback")


def _staleness(config: Config) -> Iterator[UsageError]:
    if config.rollout.max_staleness > 1:
        what = f"max-staleness must be 0 or 1 for a server, not {config.rollout.max_staleness}"
        why = "the server samples at most one step ahead"
        yield UsageError(what, why, "use 0 or 1", code="out-of-range")
    if config.rollout.max_staleness and config.grpo.is_on and not config.grpo.has_ratio:
        what = "max-staleness is 1 with a reward"
        why = "the gradient of one update leaves out the ratio to the older weights that sampled"
        do = "use --max-staleness 0, or --rollout-updates 2, whose loss has this ratio"
        yield UsageError(what, why, do, code="reward-needs")


def _host(url: str) -> str | None:
    """Return the host of an address without path and user; None if it is none."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        return None
    more = parts.path.strip("/"), parts.query, parts.fragment, parts.username
    return parts.hostname if is_whole and not any(more) else None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
