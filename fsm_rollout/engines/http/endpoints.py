"""Endpoints: which server a session is sent to, and which servers are left alone for a while.

Bookkeeping without I/O: engine.py asks before each try and tells what came of it. A session
stays with its home while that lives, so that its prefix stays in one server's cache. Sessions of a
dead endpoint, and only those, go elsewhere, and return home with it.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from urllib.parse import urlsplit
from zlib import crc32

from fsm_rollout.errors import ConfigError

MAX_FAILURES = 5
"""consecutive ones after which an endpoint is left alone"""
COOLDOWN_S, MAX_COOLDOWN_S = 1.0, 16.0
"""for how long: doubled each time that it was knocked at, until it answers a try again"""
_ROUTE = re.compile(r"/(?:(?:inference/)?v1(?:/.*)?|generate)/*$")
"""where clients of other protocols point; a path that is none may be a proxy's, in front of us"""


class Endpoint:
    """One server: its base URL, and what the last exchanges say about it."""

    __slots__ = ("cooldown_s", "failures", "last_error", "retry_at", "url")

    def __init__(self, url: str) -> None:
        self.url = url
        self.failures = 0  # consecutive
        self.cooldown_s = COOLDOWN_S
        self.retry_at = 0.0  # of the clock: when an open one may be knocked at
        self.last_error = ""

    @property
    def is_open(self) -> bool:
        """Its breaker is open: no try is sent to it before it has answered a knock."""
        return self.failures >= MAX_FAILURES

    def __repr__(self) -> str:
        return f"{self.url} ({self.failures} failures: {self.last_error or 'none yet'})"


class Endpoints:
    """The servers of one engine. Raises ConfigError for no URL, a bad one or the same one twice."""

    def __init__(
        self, urls: str | Sequence[str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not isinstance(urls, str | list | tuple):
            raise ConfigError(f"an engine needs the URLs of its servers, got {urls!r}")
        bases = [base_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not bases:
            raise ConfigError("an engine needs at least one URL, such as http://127.0.0.1:30000")
        if len(set(bases)) < len(bases):
            raise ConfigError(f"the same URL twice in {bases}")
        self._all = [Endpoint(base) for base in bases]
        self._clock = clock

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._all)

    def __getitem__(self, index: int) -> Endpoint:
        return self._all[index]

    def home(self, session_id: str) -> Endpoint:
        """Where this session goes while all is well: the same in every process."""
        return self._all[_number(session_id) % len(self._all)]

    def pick(self, session_id: str, tried: Collection[Endpoint] = ()) -> Endpoint | None:
        """Where to send this session's next try: home, else one not yet `tried`, else any.

        None: all are left alone, for `next_try_s`. One that comes back open has to be knocked at
        first (`revived`, `failed`); it is given out once per cool-down.
        """
        home = self.home(session_id)
        if not home.is_open and home not in tried:
            return home
        now = self._clock()
        ready = [e for e in self._order(session_id) if not e.is_open or e.retry_at <= now]
        endpoint = next((e for e in ready if e not in tried), ready[0] if ready else None)
        if endpoint is not None and endpoint.is_open:
            endpoint.cooldown_s = min(2 * endpoint.cooldown_s, MAX_COOLDOWN_S)
            endpoint.retry_at = now + endpoint.cooldown_s
        return endpoint

    def next_try_s(self) -> float:
        """Seconds until `pick` has an endpoint again, > 0 after it returned None."""
        if not all(endpoint.is_open for endpoint in self._all):
            return 0.0
        return max(0.0, min(endpoint.retry_at for endpoint in self._all) - self._clock())

    def succeeded(self, endpoint: Endpoint) -> None:
        """A try came back with an answer."""
        endpoint.failures = 0
        endpoint.cooldown_s = COOLDOWN_S

    def revived(self, endpoint: Endpoint) -> None:
        """It answered a knock: tries may be sent, and the first that fails opens it again."""
        endpoint.failures = min(endpoint.failures, MAX_FAILURES - 1)

    def failed(self, endpoint: Endpoint, why: str) -> bool:
        """A try or a knock failed; True when this one opened the breaker."""
        endpoint.failures += 1
        endpoint.last_error = why
        if endpoint.failures != MAX_FAILURES:
            return False
        endpoint.retry_at = self._clock() + endpoint.cooldown_s
        return True

    def _order(self, session_id: str) -> list[Endpoint]:
        """Home, then the others in an order of the session's own: a dead one's load is spread."""
        number = _number(session_id)
        others = list(self._all)
        home = others.pop(number % len(others))
        random.Random(number).shuffle(others)
        return [home, *others]


def _number(session_id: str) -> int:
    return crc32(session_id.encode())


def base_url(url: object) -> str:
    """`url` without its last slash. ConfigError when it is no server's base URL."""
    if isinstance(url, str) and not re.search(r"\s", url):
        with suppress(ValueError):  # no number for a port, half an IPv6 address
            parts = urlsplit(url)
            is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            if is_server and not parts.query and not parts.fragment:
                if route := _ROUTE.search(parts.path):
                    raise ConfigError(
                        f"{url!r} is a route of a server; leave out {route[0]!r}: an engine puts "
                        "the routes that it needs behind the base URL itself"
                    )
                return url.rstrip("/")
    raise ConfigError(f"{url!r} is no server's base URL, such as http://127.0.0.1:30000")
