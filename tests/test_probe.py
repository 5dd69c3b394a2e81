"""The probe tells scaled, raw and processed log-probs apart, and admits what it cannot tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.columns import Columns
from fsm_rollout.engines.base import Generation, LogProbKind, SamplingParams, checked
from fsm_rollout.engines.probe import Finding, fits, probe
from fsm_rollout.engines.scripted import Reply, ScriptedEngine
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.limits import StopReason

KINDS: tuple[LogProbKind, ...] = ("scaled", "raw", "processed")
PROMPT = list(range(3, 60))
VOCABULARY = 500
Logits = npt.NDArray[np.float64]


def log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max()
    result: Logits = shifted - np.log(np.exp(shifted).sum())
    return result


def narrowed(logits: Logits, params: SamplingParams) -> Logits:
    """What top-k leaves, and of that what top-p leaves; the rest is -inf."""
    order = np.argsort(-logits, kind="stable")
    kept = order[: params.top_k or None]
    share = np.exp(log_softmax(logits[kept])).cumsum()
    kept = kept[: int(np.searchsorted(share, params.top_p)) + 1]
    left = np.full_like(logits, -np.inf)
    left[kept] = logits[kept]
    return left


@dataclass
class Model:
    """An engine over made-up logits, a function of the prompt; reports one kind of log-prob."""

    kind: LogProbKind | Callable[[int], LogProbKind]
    sharpness: float = 3.0
    noise: float = 0.0
    tie: bool = False
    """the two likeliest tokens are equally likely behind every third prompt"""
    seed: int = 0
    calls: list[SamplingParams] = field(default_factory=list)

    def logits(self, ids: Sequence[int]) -> Logits:
        drawn = np.random.default_rng([self.seed, *ids]).normal(size=VOCABULARY)
        logits: Logits = self.sharpness * drawn
        if self.tie and len(ids) % 3 == 0:
            first, second = np.argsort(-logits)[:2]
            logits[second] = logits[first]
        return logits

    async def generate(
        self,
        columns: Columns,
        max_new_tokens: int,
        params: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        media: Sequence[Any] | None = None,
    ) -> Generation:
        self.calls.append(params)
        draw = np.random.default_rng([len(self.calls), columns.length])
        logits = self.logits(columns.tokens.tolist())
        logits += self.noise * draw.uniform(-1, 1, VOCABULARY)  # another batch, another rounding
        token, log_prob = self.sampled(logits, params, draw, columns.length)
        return checked(
            [token], [log_prob], "length", max_new_tokens=max_new_tokens, engine_id="made-up"
        )

    def sampled(
        self, logits: Logits, params: SamplingParams, draw: np.random.Generator, length: int = 0
    ) -> tuple[int, float]:
        scaled = logits / (params.temperature or 1)
        left = narrowed(scaled, params)
        probabilities = np.exp(log_softmax(left))
        token = int(
            probabilities.argmax()
            if params.temperature == 0
            else draw.choice(VOCABULARY, p=probabilities)
        )
        kind = self.kind if isinstance(self.kind, str) else self.kind(length)
        reported = {"scaled": scaled, "raw": logits, "processed": left}[kind]
        return token, min(0.0, float(log_softmax(reported)[token]))

    async def abort(self, request_id: str) -> None: ...

    async def close(self) -> None: ...


def found(engine: Any, ids: Sequence[int] = PROMPT, **options: Any) -> Finding:
    return asyncio.run(probe(engine, list(ids), **options))


@given(
    kind=st.sampled_from(KINDS),
    sharpness=st.floats(0.5, 6),
    noise=st.floats(0, 0.05),
    tie=st.booleans(),
    seed=st.integers(0, 1_000_000),
)
def test_each_kind_is_recognised_through_rounding_and_ties(
    kind: LogProbKind, sharpness: float, noise: float, tie: bool, seed: int
) -> None:
    finding = found(Model(kind, sharpness=sharpness, noise=noise, tie=tie, seed=seed))
    assert finding.kind == kind, "\n".join(map(str, finding.sights))


@given(kind=st.sampled_from(KINDS), length=st.integers(1, 20))
def test_a_short_prompt_will_do(kind: LogProbKind, length: int) -> None:
    assert found(Model(kind), PROMPT[:length]).kind == kind


@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 1_000))
def test_few_calls_of_one_token_tell(kind: LogProbKind, seed: int) -> None:
    engine = Model(kind, seed=seed)
    found(engine)
    assert 9 <= len(engine.calls) <= 48


def test_the_temperature_is_not_asked_for_with_a_greedy_setting() -> None:
    engine = Model("scaled")
    found(engine)
    assert all(params.top_k == 0 and params.temperature > 0 for params in engine.calls)


def test_a_model_that_is_certain_of_every_token_tells_raw_from_processed_to_nobody() -> None:
    for kind in ("raw", "processed"):
        assert found(Model(kind, sharpness=1_000)).kind is None


def test_a_model_that_knows_nothing_tells_nothing() -> None:
    for kind in ("scaled", "raw"):
        assert found(Model(kind, sharpness=1e-3)).kind is None


def test_an_engine_that_is_certain_most_of_the_time_is_asked_until_enough_is_told() -> None:
    engine = Model("processed")
    hesitant = engine.logits

    def logits(ids: Sequence[int]) -> Logits:
        return hesitant(ids) * (1 if len(ids) < 15 else 1_000)

    engine.logits = logits  # type: ignore[method-assign]
    finding = found(engine)
    assert finding.kind == "processed"
    assert sum(sight.kind is None for sight in finding.sights) > 5


def test_an_engine_of_two_minds_is_not_believed() -> None:
    finding = found(Model(lambda length: "raw" if length > 55 else "scaled"))
    assert {sight.kind for sight in finding.sights} >= {"raw", "scaled"}
    assert finding.kind is None


def test_made_up_log_probs_are_never_taken_for_scaled_ones() -> None:
    constant = found(ScriptedEngine(lambda asked: Reply([7])))
    assert constant.kind == "raw"
    upside_down = found(
        ScriptedEngine(lambda asked: Reply([7], log_probs=[-asked.params.temperature and -2.0]))
    )
    assert upside_down.kind == "raw"
    rising = ScriptedEngine(lambda asked: Reply([7], log_probs=[-5 + asked.params.temperature]))
    assert found(rising).kind is None


def test_a_finding_that_fits_gives_its_kind_and_one_that_does_not_tells_how_to_mend_it() -> None:
    assert found(Model("scaled")).require(SamplingParams(temperature=0.7, top_p=0.9)) == "scaled"
    assert found(Model("processed")).require(SamplingParams(temperature=0.7)) == "processed"
    with pytest.raises(
        ConfigError, match=r"made-up reports raw (.|\n)*processed_logprobs(.|\n)* tokens:"
    ):
        found(Model("raw")).require(SamplingParams(temperature=0.7))
    with pytest.raises(ConfigError, match=r"top_p 0\.9(.|\n)*Sample with top_p 1 and top_k 0"):
        found(Model("processed")).require(SamplingParams(top_p=0.9))
    with pytest.raises(ConfigError, match=r"the engine reports raw .*_ORIGINAL_LOGPROB$"):
        Finding("raw", ()).require(SamplingParams(temperature=0.7))  # as somebody said
    with pytest.raises(ConfigError, match=r"could not be told(.|\n)*log_prob_kind(.|\n)*cannot"):
        found(Model("raw", sharpness=1_000)).require(SamplingParams())


@given(
    kind=st.sampled_from(KINDS),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.5, 1.0]),
    top_k=st.sampled_from([0, 2]),
)
def test_a_kind_fits_exactly_where_its_log_probs_are_the_scaled_ones(
    kind: LogProbKind, temperature: float, top_p: float, top_k: int
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    engine = Model(kind, sharpness=1.0)
    is_scaled = True
    for seed in range(20):
        logits = engine.logits([seed])
        token, log_prob = engine.sampled(logits, params, np.random.default_rng(seed))
        scaled = log_softmax(logits / (temperature or 1))[token]
        is_scaled &= bool(np.isclose(log_prob, scaled, atol=1e-9))
    assert fits(kind, params) == is_scaled


def test_tokens_that_the_engine_leaves_out_tell_nothing() -> None:
    silent = found(ScriptedEngine(lambda asked: Reply([])))
    assert silent == Finding(None, ())


def test_an_engine_without_log_probs_cannot_be_probed() -> None:
    without = ScriptedEngine(lambda asked: Reply([7], log_probs=None), log_probs_required=False)
    with pytest.raises(ConfigError, match="no log-probs"):
        found(without)
    with pytest.raises(EngineError) as raised:
        found(ScriptedEngine(lambda asked: Reply([7], log_probs=None)))
    assert raised.value.reason is StopReason.MISSING_LOG_PROBS


def test_a_probe_has_a_deadline_and_needs_a_prompt() -> None:
    slow = ScriptedEngine(lambda asked: Reply([7], delay_s=60))
    with pytest.raises(EngineError, match=r"not probed within 0\.05 s") as raised:
        found(slow, timeout_s=0.05)
    assert raised.value.reason is StopReason.DEADLINE
    with pytest.raises(ConfigError, match="got none"):
        found(Model("raw"), [])


def test_the_engine_in_process_reports_scaled_log_probs() -> None:
    pytest.importorskip("torch")
    from tests.tiny_llama import serve

    finding = serve(lambda engine: probe(engine, PROMPT))
    assert finding.kind == "scaled"
