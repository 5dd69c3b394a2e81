"""A finished batch in numbers: `metrics_of`.

What there is nothing to say about has no entry: a mean over nothing is neither 0 nor NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, get_args

import numpy as np

from fsm_rollout.errors import ConfigError
from fsm_rollout.limits import TERMINAL, Status, StopReason
from fsm_rollout.metrics.facts import Facts, RowFacts, facts_of
from fsm_rollout.request import Group, Request
from fsm_rollout.tools.result import EXECUTED, Outcome

_CUT = frozenset(
    {
        StopReason.LENGTH,
        StopReason.MAX_RESPONSE,
        StopReason.MAX_CONTEXT,
        StopReason.OBSERVATION_OVERFLOW,
    }
)
"""stop reasons of a response that met a budget of tokens"""


def metrics_of(
    played: Iterable[Request | Group | Facts], *, seconds: float | None = None
) -> dict[str, float]:
    """What a finished batch was like; docs/reference/metrics.md lists the names.

    `seconds`: how long the batch took, for perf/tokens_per_s. A request's turns, calls, rows and
    times are those of its children too, and what an earlier attempt counted is gone with it.
    """
    if not isinstance(played, Iterable):
        raise _no_request(played)
    facts: list[Facts] = []
    for one in played:
        if not isinstance(one, Request | Group | Facts):
            raise _no_request(one)
        ended = one.requests if isinstance(one, Group) else [one]
        facts += [each if isinstance(each, Facts) else facts_of(each) for each in ended]
    if not facts:
        return {}
    usable = [one for one in facts if one.is_usable]
    rows = [row for one in facts for row in one.rows]
    return {
        **_outcomes(facts, usable),
        **_sizes(facts, usable, rows),
        **_rewards(usable),
        **_versions(rows),
        **_times(facts, seconds),
        **_tools_and_engine(facts),
    }


def _no_request(given: object) -> ConfigError:
    return ConfigError(
        f"metrics_of takes a list of groups or requests, got {type(given).__name__}; "
        "give it what `generate` returned"
    )


def _outcomes(facts: list[Facts], usable: list[Facts]) -> dict[str, float]:
    count = len(facts)
    statuses = Counter(one.status for one in facts)
    reasons = Counter(one.stop_reason for one in facts if one.stop_reason is not None)
    aborts = {reason: n for reason, n in reasons.items() if reason.status is Status.ABORTED}
    attempts = sum(one.attempts for one in facts)
    metrics: dict[str, float] = {
        "rollout/requests": count,
        "rollout/groups": len({one.group for one in facts}),
        "rollout/attempts": attempts,
        "rollout/retries": attempts - count,
        "rollout/abort_rate": sum(aborts.values()) / count,
        **{f"rollout/status/{status}": statuses[status] for status in sorted(TERMINAL)},
        **{f"rollout/stop_reason/{reason}": n for reason, n in sorted(reasons.items())},
        **{f"rollout/abort/{reason}": n for reason, n in sorted(aborts.items())},
        **{f"rollout/abort_rate/{reason}": n / count for reason, n in sorted(aborts.items())},
    }
    if usable:
        metrics["rollout/truncated_ratio"] = statuses[Status.TRUNCATED] / len(usable)
        metrics["rollout/clip_ratio"] = sum(one.stop_reason in _CUT for one in usable) / len(usable)
    return metrics


def _sizes(facts: list[Facts], usable: list[Facts], rows: list[RowFacts]) -> dict[str, float]:
    sampled = sum(one.num_sampled for one in facts)
    in_rows = sum(row.num_sampled for row in rows)
    written = sum(one.num_written_calls for one in facts)
    malformed = sum(one.num_malformed_calls for one in facts)
    kept = kept_per_trained_token(rows)
    return {
        **_stats("rollout/turns", [one.num_turns for one in usable]),
        **_stats("rollout/tool_calls", [one.num_tool_calls for one in usable]),
        "rollout/invalid_calls": sum(one.num_invalid_calls for one in facts),
        **({"rollout/malformed_call_rate": malformed / written} if written else {}),
        "rollout/rows": len(rows),
        "rollout/removed_rows": sum(row.is_removed for row in rows),
        "rollout/tokens/prompt": sum(row.prompt_length for row in rows),
        "rollout/tokens/sampled": sampled,
        "rollout/tokens/trained": sum(row.num_trained for row in rows),
        "rollout/tokens/tool": sum(row.response_length - row.num_sampled for row in rows),
        "rollout/tokens/aborted": sampled - in_rows,
        **_stats("rollout/prompt_length", [row.prompt_length for row in rows]),
        **_stats("rollout/response_length", [row.response_length for row in rows]),
        **_stats("rollout/trained_length", [row.num_trained for row in rows]),
        **({} if kept is None else {"rollout/top_p_kept": kept}),
    }


def _rewards(usable: list[Facts]) -> dict[str, float]:
    groups: dict[Any, list[float]] = {}
    parts: dict[str, list[float]] = {}
    for one in usable:
        if one.reward is not None:
            groups.setdefault(one.group, []).append(one.reward)
        for name, value in one.reward_parts.items():
            parts.setdefault(name, []).append(value)
    given = [reward for rewards in groups.values() for reward in rewards]
    compared = [rewards for rewards in groups.values() if len(rewards) > 1]
    metrics: dict[str, float] = {
        "rollout/reward/missing": len(usable) - len(given),
        "rollout/reward/count": len(given),
        **_stats("rollout/reward", given, std=True),
    }
    for name, values in sorted(parts.items()):
        metrics |= _stats(f"rollout/reward_part/{name}", values, std=True)
    if compared:
        same = sum(min(rewards) == max(rewards) for rewards in compared)
        metrics["rollout/reward/zero_std_groups"] = same / len(compared)
    return metrics


def _versions(rows: list[RowFacts]) -> dict[str, float]:
    versions = [row.versions for row in rows]
    known = [v for v in chain.from_iterable(versions) if isinstance(v, int)]
    if not known:
        return {}
    return {
        "rollout/weight_version/min": min(known),
        "rollout/weight_version/max": max(known),
        "rollout/weight_version/mixed_rows": sum(len(set(one)) > 1 for one in versions),
    }


def _times(facts: list[Facts], seconds: float | None) -> dict[str, float]:
    metrics = {
        **_stats("perf/generate_s", [one.generate_s for one in facts], percentiles=True),
        **_stats("perf/tool_s", [one.tool_s for one in facts], percentiles=True),
    }
    if seconds is not None:
        metrics["perf/seconds"] = seconds
        if seconds > 0:
            metrics["perf/tokens_per_s"] = sum(one.num_sampled for one in facts) / seconds
    return metrics


def _tools_and_engine(facts: list[Facts]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for one in facts:
        counts.update(one.counts)
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


def kept_per_trained_token(rows: Iterable[RowFacts]) -> float | None:
    """The mean number of ids that top-p kept, over trained tokens; None: there is none to average.

    Rows that were taken out of training or did not report it are left out.
    """
    told = [(row.top_p_kept, row.num_trained) for row in rows if row.top_p_kept is not None]
    trained = sum(count for _, count in told)
    return sum(kept for kept, _ in told) / trained if trained else None
