"""Metrics: a finished batch as one flat dict of floats, for whatever tracker the trainer has.

`metrics_of` counts requests, `Alarm` judges how many were aborted, `named` translates into names of
verl, slime and TRL. What there is nothing to say about has no entry: a mean over nothing is neither
0 nor NaN.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import get_args

import numpy as np

from fsm_rollout.errors import ConfigError, RolloutError
from fsm_rollout.limits import TERMINAL, Status, StopReason
from fsm_rollout.request import Group, Request
from fsm_rollout.sample import Sample
from fsm_rollout.tools.result import EXECUTED, Outcome

logger = logging.getLogger(__name__)

_CUT = frozenset(
    {
        StopReason.LENGTH,
        StopReason.MAX_RESPONSE,
        StopReason.MAX_CONTEXT,
        StopReason.OBSERVATION_OVERFLOW,
    }
)
"""stop reasons of a response that met a budget of tokens"""


# -- a batch ---------------------------------------------------------------------------------------


def metrics_of(
    played: Iterable[Request | Group], *, seconds: float | None = None
) -> dict[str, float]:
    """What a finished batch was like; docs/reference/metrics.md lists the names.

    `seconds`: how long the batch took, for perf/tokens_per_s. A request's turns, calls, rows and
    times are those of its children too, and what an earlier attempt counted is gone with it.
    """
    if not isinstance(played, Iterable):
        raise _no_request(played)
    requests = [r for one in played for r in (one.requests if isinstance(one, Group) else [one])]
    for request in requests:
        if not isinstance(request, Request):
            raise _no_request(request)
    if not requests:
        return {}
    usable = [r for r in requests if r.is_done and r.status is not Status.ABORTED]
    rows = [row for request in usable for row in request.rows]
    return {
        **_outcomes(requests, usable),
        **_sizes(requests, usable, rows),
        **_rewards(usable),
        **_versions(rows),
        **_times(requests, seconds),
        **_tools_and_engine(requests),
    }


def _no_request(given: object) -> ConfigError:
    return ConfigError(
        f"metrics_of takes a list of groups or requests, got {type(given).__name__}; "
        "give it what `generate` returned"
    )


def _outcomes(requests: list[Request], usable: list[Request]) -> dict[str, float]:
    count = len(requests)
    statuses = Counter(request.status for request in requests)
    reasons = Counter(r.stop_reason for r in requests if r.stop_reason is not None)
    aborts = {reason: n for reason, n in reasons.items() if reason.status is Status.ABORTED}
    metrics: dict[str, float] = {
        "rollout/requests": count,
        "rollout/groups": len({request.group_index for request in requests}),
        "rollout/attempts": sum(request.attempt for request in requests),
        "rollout/retries": sum(request.attempt - 1 for request in requests),
        "rollout/abort_rate": sum(aborts.values()) / count,
        **{f"rollout/status/{status}": statuses[status] for status in sorted(TERMINAL)},
        **{f"rollout/stop_reason/{reason}": n for reason, n in sorted(reasons.items())},
        **{f"rollout/abort/{reason}": n for reason, n in sorted(aborts.items())},
        **{f"rollout/abort_rate/{reason}": n / count for reason, n in sorted(aborts.items())},
    }
    if usable:
        metrics["rollout/truncated_ratio"] = statuses[Status.TRUNCATED] / len(usable)
        metrics["rollout/clip_ratio"] = sum(r.stop_reason in _CUT for r in usable) / len(usable)
    return metrics


def _sizes(requests: list[Request], usable: list[Request], rows: list[Sample]) -> dict[str, float]:
    kept = {id(row) for row in rows}
    lost = [s for r in requests for one in _family(r) for s in one.samples if id(s) not in kept]
    turns = [sum(one.num_turns for one in _family(r)) for r in usable]
    calls = [sum(one.num_tool_calls for one in _family(r)) for r in usable]
    return {
        **_stats("rollout/turns", turns),
        **_stats("rollout/tool_calls", calls),
        "rollout/invalid_calls": sum(one.num_invalid_calls for r in requests for one in _family(r)),
        "rollout/rows": len(rows),
        "rollout/removed_rows": sum(row.remove_sample for row in rows),
        "rollout/tokens/prompt": sum(row.prompt_length for row in rows),
        "rollout/tokens/sampled": sum(s.columns.num_sampled for s in (*rows, *lost)),
        "rollout/tokens/trained": sum(row.columns.num_trained for row in rows),
        "rollout/tokens/tool": sum(row.response_length - row.columns.num_sampled for row in rows),
        "rollout/tokens/aborted": sum(s.columns.num_sampled for s in lost),
        **_stats("rollout/prompt_length", [row.prompt_length for row in rows]),
        **_stats("rollout/response_length", [row.response_length for row in rows]),
        **_stats("rollout/trained_length", [row.columns.num_trained for row in rows]),
        **_some("rollout/top_p_kept", kept_per_trained_token(rows)),
    }


def _rewards(usable: list[Request]) -> dict[str, float]:
    rewarded = [r for r in usable if r.reward is not None]
    groups: dict[int, list[float]] = {}
    parts: dict[str, list[float]] = {}
    for request in rewarded:
        groups.setdefault(request.group_index, []).append(request.reward or 0.0)
    for request in usable:
        for name, value in request.reward_parts.items():
            parts.setdefault(name, []).append(value)
    compared = [rewards for rewards in groups.values() if len(rewards) > 1]
    metrics: dict[str, float] = {
        "rollout/reward/missing": len(usable) - len(rewarded),
        "rollout/reward/count": len(rewarded),
        **_stats("rollout/reward", [r.reward or 0.0 for r in rewarded], std=True),
    }
    for name, values in sorted(parts.items()):
        metrics |= _stats(f"rollout/reward_part/{name}", values, std=True)
    if compared:
        same = sum(min(rewards) == max(rewards) for rewards in compared)
        metrics["rollout/reward/zero_std_groups"] = same / len(compared)
    return metrics


def _versions(rows: list[Sample]) -> dict[str, float]:
    versions = [[version for version, _ in row.weight_versions] for row in rows]
    known = [v for v in chain.from_iterable(versions) if isinstance(v, int)]
    if not known:
        return {}
    return {
        "rollout/weight_version/min": min(known),
        "rollout/weight_version/max": max(known),
        "rollout/weight_version/mixed_rows": sum(len(set(one)) > 1 for one in versions),
    }


def _times(requests: list[Request], seconds: float | None) -> dict[str, float]:
    samples = [[s for one in _family(r) for s in one.samples] for r in requests]
    generate = [
        sum(t.seconds for s in own for t in s.turns if t.kind == "model") for own in samples
    ]
    metrics = {
        **_stats("perf/generate_s", generate, percentiles=True),
        **_stats(
            "perf/tool_s",
            [sum(s.non_generation_time for s in own) for own in samples],
            percentiles=True,
        ),
    }
    if seconds is not None:
        sampled = sum(s.columns.num_sampled for s in chain.from_iterable(samples))
        metrics["perf/seconds"] = seconds
        if seconds > 0:
            metrics["perf/tokens_per_s"] = sampled / seconds
    return metrics


def _tools_and_engine(requests: list[Request]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for one in chain.from_iterable(map(_family, requests)):
        counts.update(one.metrics)
    metrics: dict[str, float] = {}
    calls: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for name, value in sorted(counts.items()):
        if name.startswith("engine/"):
            metrics[name] = value
            continue
        tool, _, what = name.rpartition("/")
        if tool.startswith("tool/") and what == "seconds":
            seconds[tool] = value
        elif tool.startswith("tool/") and what in _OUTCOMES:
            metrics[name] = value
            calls[tool] += int(value)
        else:
            metrics[f"tools/{name}"] = value
    for tool, count in calls.items():
        metrics[f"{tool}/calls"] = count
        ran = sum(metrics.get(f"{tool}/{outcome}", 0) for outcome in EXECUTED)
        if ran:
            metrics[f"{tool}/seconds_per_call"] = seconds.get(tool, 0.0) / ran
    if calls:
        failed = sum(metrics.get(f"{tool}/{how}", 0) for tool in calls for how in _FAILED)
        metrics["tools/failure_rate"] = failed / sum(calls.values())
    if counts["engine/prompt_tokens"]:
        hits = counts["engine/cached_tokens"] / counts["engine/prompt_tokens"]
        metrics["engine/cache_hit_rate"] = hits
    return metrics


_OUTCOMES = frozenset(get_args(Outcome))
_FAILED = ("tool_error", "error", "timeout", "unavailable", "bad_arguments")


def _family(request: Request) -> Iterator[Request]:
    yield request
    for child in request.children:
        yield from _family(child)


def _stats(
    name: str, values: Sequence[float], *, std: bool = False, percentiles: bool = False
) -> dict[str, float]:
    if not values:
        return {}
    array = np.asarray(values, np.float64)
    found = {"mean": array.mean(), "min": array.min(), "max": array.max()}
    found["p50"] = np.median(array)
    if std:
        found["std"] = array.std()
    if percentiles:
        found |= {"p95": np.percentile(array, 95), "p99": np.percentile(array, 99)}
    return {f"{name}/{what}": float(value) for what, value in found.items()}


def _some(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: value}


def kept_per_trained_token(samples: Iterable[Sample]) -> float | None:
    """The mean number of ids that top-p kept, over trained tokens; None: there is none to average.

    Samples that were taken out of training or did not report it are left out.
    """
    kept = trained = 0
    for sample in samples:
        offsets = sample.rollout_top_p_token_offsets
        if offsets is not None and not sample.remove_sample:
            mask = sample.loss_mask.astype(bool)
            kept += int(np.diff(offsets)[mask].sum())
            trained += int(mask.sum())
    return kept / trained if trained else None


# -- how many are too many -------------------------------------------------------------------------


class AlarmError(RolloutError):
    """More requests were aborted for one reason than an `Alarm(..., raises=True)` allows."""


class Alarm:
    """Says loudly when too large a part of a batch was aborted for one reason.

        alarm = Alarm({"engine_error": 0.05}, default=0.2)
        metrics = alarm.watch(requests)  # metrics_of(requests), and the alarm

    Adds `rollout/abort/alarm`, the number of reasons whose rate is above its threshold, and logs an
    error; `raises`: an AlarmError too. Raises ConfigError for what is no reason of an abort.
    """

    def __init__(
        self, thresholds: Mapping[str, float] | None = None, *, default: float, raises: bool = False
    ) -> None:
        known = [str(reason) for reason in StopReason if reason.status is Status.ABORTED]
        for reason in thresholds or {}:
            if reason not in known:
                near = difflib.get_close_matches(str(reason), known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ConfigError(f"no request is aborted for {reason!r}; {hint}")
        self._thresholds = dict.fromkeys(known, default) | dict(thresholds or {})
        for reason, most in self._thresholds.items():
            if not 0 <= most <= 1:
                raise ConfigError(f"the abort rate of {reason!r} must be within [0, 1], got {most}")
        self._raises = raises

    def __call__(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metric to add to those of `metrics_of`, for callers that have these already."""
        said = []
        for reason, most in self._thresholds.items():
            rate = metrics.get(f"rollout/abort_rate/{reason}", 0.0)
            if rate > most:
                count = metrics.get(f"rollout/abort/{reason}", 0.0)
                said.append(
                    f"{rate:.1%} of {metrics.get('rollout/requests', 0.0):.0f} requests "
                    f"({count:.0f}) were aborted for {reason}, allowed are {most:.1%}"
                )
        if said:
            text = f"abort rate alarm: {'; '.join(said)}. `Request.error` says what went wrong"
            logger.error("%s", text)
            if self._raises:
                raise AlarmError(text)
        return {"rollout/abort/alarm": len(said)}

    def watch(
        self, played: Iterable[Request | Group], *, seconds: float | None = None
    ) -> dict[str, float]:
        """What `metrics_of` says of a batch, and the alarm; what adapters report of theirs."""
        metrics = metrics_of(played, seconds=seconds)
        return metrics | self(metrics) if metrics else {}


# -- names of the ecosystem ------------------------------------------------------------------------


def named(metrics: Mapping[str, float], trainer: str) -> dict[str, float]:
    """Those of `metrics` that `trainer` ("verl", "slime", "trl") logs too, under its names.

    What counts by another rule there is listed in docs/reference/metrics.md. Raises ConfigError for
    another trainer.
    """
    if trainer not in NAMES:
        raise ConfigError(f"no names of {trainer!r}; known: {', '.join(NAMES)}")
    found: dict[str, float] = {}
    for theirs, ours in NAMES[trainer].items():
        if ours in metrics:
            found[theirs] = metrics[ours]
        elif ours.endswith("/*"):
            start, replaced = ours[:-1], theirs[:-1]
            found |= {
                replaced + name.removeprefix(start): value
                for name, value in metrics.items()
                if name.startswith(start)
            }
    return found


def _each(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}/{what}": f"{ours}/{what}" for what in ("mean", "min", "max")}


NAMES: Mapping[str, Mapping[str, str]] = {
    "verl": {
        **_each("response_length", "rollout/response_length"),
        "response_length/clip_ratio": "rollout/clip_ratio",
        "response/aborted_ratio": "rollout/abort_rate",
        **_each("prompt_length", "rollout/prompt_length"),
        **_each("num_turns", "rollout/turns"),
        **_each("tool_call_counts", "rollout/tool_calls"),
        **_each("critic/score", "rollout/reward"),
        **_each("critic/rewards", "rollout/reward"),
        **_each("timing_s/agent_loop/generate_sequences", "perf/generate_s"),
        **_each("timing_s/agent_loop/tool_calls", "perf/tool_s"),
        "timing_s/gen": "perf/seconds",
        "rollout_corr/kl": "log_prob_gap/kl_k1",
        "rollout_corr/k3_kl": "log_prob_gap/kl_k3",
    },
    "slime": {
        **_each("rollout/response_len", "rollout/trained_length"),
        "rollout/response_len/median": "rollout/trained_length/p50",
        "rollout/truncated_ratio": "rollout/truncated_ratio",
        "rollout/raw_reward": "rollout/reward/mean",
        "rollout/top_p_kept_vocab_per_token": "rollout/top_p_kept",
        "rollout/prefix_cache_hit_rate": "engine/cache_hit_rate",
        "perf/rollout_time": "perf/seconds",
        **_each("perf/non_generation_time", "perf/tool_s"),
        "perf/non_generation_time/median": "perf/tool_s/p50",
    },
    "trl": {
        "completions/mean_length": "rollout/trained_length/mean",
        "completions/min_length": "rollout/trained_length/min",
        "completions/max_length": "rollout/trained_length/max",
        "completions/clipped_ratio": "rollout/clip_ratio",
        "tools/call_frequency": "rollout/tool_calls/mean",
        "tools/failure_frequency": "tools/failure_rate",
        "reward": "rollout/reward/mean",
        "reward_std": "rollout/reward/std",
        "frac_reward_zero_std": "rollout/reward/zero_std_groups",
        "rewards/*": "rollout/reward_part/*",
        "sampling/sampling_logp_difference/mean": "log_prob_gap/mean",
        "sampling/sampling_logp_difference/max": "log_prob_gap/max",
        **_each("sampling/importance_sampling_ratio", "log_prob_gap/ratio"),
    },
}
"""theirs from ours, by trainer; /* stands for the rest of a name"""
