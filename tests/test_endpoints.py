"""engines/http/endpoints.py: sessions stay where their prefix is, dead servers are left alone."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fsm_rollout.engines.http.endpoints import (
    COOLDOWN_S,
    MAX_COOLDOWN_S,
    MAX_FAILURES,
    Endpoint,
    Endpoints,
)
from fsm_rollout.errors import ConfigError

SESSIONS = [f"run-{number}" for number in range(40)]


class Breakers(RuleBasedStateMachine):
    """Servers die and come back; the model knows which, `Endpoints` only what it is told."""

    @initialize(count=st.integers(1, 5))
    def servers(self, count: int) -> None:
        self.now = 100.0
        self.endpoints = Endpoints(
            [f"http://server-{number}:30000" for number in range(count)], clock=lambda: self.now
        )
        self.dead: set[Endpoint] = set()
        self.failures: Counter[Endpoint] = Counter()  # in a row
        self.knocks: dict[Endpoint, list[float]] = {endpoint: [] for endpoint in self.endpoints}

    @rule(session=st.sampled_from(SESSIONS), tries=st.integers(1, 8))
    def generate(self, session: str, tries: int) -> None:
        tried: list[Endpoint] = []
        for _ in range(tries):
            was_open = {endpoint for endpoint in self.endpoints if endpoint.is_open}
            endpoint = self.endpoints.pick(session, tried)
            if endpoint is None:
                assert was_open == set(self.endpoints), "a closed one was kept back"
                assert 0 < self.endpoints.next_try_s() <= MAX_COOLDOWN_S
                return
            home = self.endpoints.home(session)
            if endpoint is not home:
                assert home in was_open or home in tried, "a session left a home that lives"
            if endpoint in tried:
                assert was_open | set(tried) == set(self.endpoints), "an untried one was there"
            if endpoint in was_open and not self.knock(endpoint):
                tried.append(endpoint)
                continue
            if endpoint not in self.dead:
                self.endpoints.succeeded(endpoint)
                self.failures[endpoint] = 0
                assert not endpoint.is_open
                return
            self.fail(endpoint)
            tried.append(endpoint)

    def knock(self, endpoint: Endpoint) -> bool:
        knocks = self.knocks[endpoint]
        assert not knocks or self.now - knocks[-1] >= COOLDOWN_S, "knocked at twice at once"
        knocks.append(self.now)
        if endpoint in self.dead:
            assert not self.endpoints.failed(endpoint, "refused"), "it was open already"
            return False
        self.endpoints.revived(endpoint)
        assert not endpoint.is_open
        return True

    def fail(self, endpoint: Endpoint) -> None:
        was_open = endpoint.is_open
        self.failures[endpoint] += 1
        assert self.endpoints.failed(endpoint, "refused") == (endpoint.is_open and not was_open)
        if self.failures[endpoint] >= MAX_FAILURES:
            assert endpoint.is_open

    @rule(which=st.integers(0, 4))
    def a_late_failure_arrives(self, which: int) -> None:
        endpoint = self.endpoints[which % len(self.endpoints)]
        if endpoint in self.dead:
            self.fail(endpoint)

    @rule(which=st.integers(0, 4))
    def dies(self, which: int) -> None:
        self.dead.add(self.endpoints[which % len(self.endpoints)])

    @rule(which=st.integers(0, 4))
    def comes_back(self, which: int) -> None:
        self.dead.discard(self.endpoints[which % len(self.endpoints)])

    @rule(seconds=st.floats(0.01, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def next_try_is_near(self) -> None:
        assert 0 <= self.endpoints.next_try_s() <= MAX_COOLDOWN_S

    def teardown(self) -> None:
        """Once all servers are well, every session is at home again within two cool-downs."""
        self.dead.clear()
        for _ in range(2):
            self.now += MAX_COOLDOWN_S
            for session in SESSIONS * len(self.endpoints):
                self.generate(session, 8)
        for session in SESSIONS:
            assert self.endpoints.pick(session) is self.endpoints.home(session)


TestBreakers = Breakers.TestCase
TestBreakers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def kill(endpoints: Endpoints, endpoint: Endpoint) -> None:
    for _ in range(MAX_FAILURES):
        endpoints.failed(endpoint, "refused")


URLS = [f"http://server-{number}:30000" for number in range(8)]


def test_only_the_sessions_of_a_dead_endpoint_move_and_its_load_is_spread() -> None:
    endpoints = Endpoints(URLS)
    sessions = [f"session-{number}" for number in range(2_000)]
    homes = {session: endpoints.pick(session) for session in sessions}
    load = Counter(homes.values())
    assert min(load.values()) > 150, "each server has its share of 250"
    dead = endpoints[3]
    kill(endpoints, dead)
    moved = Counter[Endpoint | None]()
    for session in sessions:
        now = endpoints.pick(session)
        if homes[session] is dead:
            assert now is not dead
            assert endpoints.pick(session) is now, "it stays where it went"
            moved[now] += 1
        else:
            assert now is homes[session]
    assert len(moved) == 7
    assert max(moved.values()) < 70, "each of the others takes its share of 36"
    endpoints.revived(dead)
    assert {session: endpoints.pick(session) for session in sessions} == homes


def test_the_home_of_a_session_is_the_same_in_every_process() -> None:
    endpoints = Endpoints(URLS)
    homes = [endpoints.home(f"session-{number}").url[-7] for number in range(8)]
    assert homes == ["0", "6", "4", "2", "1", "7", "5", "3"]


def test_an_endpoint_that_stays_dead_is_knocked_at_ever_more_rarely() -> None:
    now = 0.0
    endpoints = Endpoints(URLS[0], clock=lambda: now)
    kill(endpoints, endpoints[0])
    knocks = []
    while now < 120:
        assert endpoints.pick("s") is None
        now += endpoints.next_try_s()
        assert endpoints.pick("s") is endpoints[0]
        endpoints.failed(endpoints[0], "refused")
        knocks.append(now)
    pauses = [round(b - a, 6) for a, b in zip([0.0, *knocks], knocks, strict=False)]
    assert pauses[:6] == [1, 2, 4, 8, 16, 16]
    assert set(pauses[4:]) == {MAX_COOLDOWN_S}


def test_an_endpoint_that_answers_knocks_but_no_try_is_left_alone_longer_each_time() -> None:
    now = 0.0
    endpoints = Endpoints(URLS[0], clock=lambda: now)
    (endpoint,) = endpoints
    kill(endpoints, endpoint)
    pauses = []
    for _ in range(6):
        pauses.append(endpoints.next_try_s())
        now += endpoints.next_try_s()
        assert endpoints.pick("s") is endpoint
        endpoints.revived(endpoint)
        assert endpoints.failed(endpoint, "HTTP 500"), "one failure is enough"
    assert pauses == [1, 2, 4, 8, 16, 16]
    endpoints.succeeded(endpoint)
    kill(endpoints, endpoint)
    assert endpoints.next_try_s() == COOLDOWN_S


@given(st.lists(st.integers(0, 7), unique=True), st.sampled_from(SESSIONS))
def test_what_was_not_tried_yet_comes_first(which: list[int], session: str) -> None:
    endpoints = Endpoints(URLS)
    tried = [endpoints[index] for index in which]
    endpoint = endpoints.pick(session, tried)
    assert (endpoint in tried) == (len(tried) == len(URLS))
    assert endpoints.home(session) in tried or endpoint is endpoints.home(session)


def test_base_urls_lose_their_last_slash() -> None:
    endpoints = Endpoints(["http://a:1/", "https://b/v10/", "http://[::1]:8000"])
    assert [e.url for e in endpoints] == ["http://a:1", "https://b/v10", "http://[::1]:8000"]


@pytest.mark.parametrize(
    "urls",
    [
        [],
        "",
        "localhost:30000",
        "127.0.0.1:30000",
        "ftp://a",
        "http://",
        "http://a:0",
        "http://a:port",
        "http://a:99999",
        "http://[::1",
        "http://a/?x=1",
        "http://a/#x",
        " http://a",
        "http://a\n",
        "http://a b",
        ["http://a", "http://a/"],
    ],
    ids=repr,
)
def test_urls_that_are_no_servers_are_refused(urls: str | list[str]) -> None:
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:30000|twice"):
        Endpoints(urls)


@pytest.mark.parametrize(
    "route",
    ["/v1", "/v1/", "/v1/completions", "/generate", "/inference/v1/generate", "/api/v1/chat"],
)
def test_a_route_is_no_base_url(route: str) -> None:
    with pytest.raises(
        ConfigError, match=f"'http://a{route}' is a route of a server; leave out '/"
    ):
        Endpoints(f"http://a{route}")
