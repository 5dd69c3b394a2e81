"""Every number of a batch, counted again from its rows as plain JSON values.

Batches as they come: forks, sub-agents, aborted, retried and removed requests, replay data, step
rewards, rewards that are None.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.agent import Context
from fsm_rollout.codec import Codec
from fsm_rollout.engines.base import Generation
from fsm_rollout.engines.scripted import Asked, Reply, ScriptedEngine
from fsm_rollout.errors import EngineError, RolloutError, ToolError
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.metrics import metrics_of
from fsm_rollout.replay import top_p_of
from fsm_rollout.request import Request
from fsm_rollout.rewards import model_turns
from fsm_rollout.rollout import Rollout
from fsm_rollout.tools.base import Tool, ToolResponse
from fsm_rollout.tools.registry import Toolset
from tests.playing import CALL, TOKENIZER, ids

REPLIES = ("text", "call", "calls", "malformed", "unknown", "long", "aborted", "error", "late")
STEPS = ("generate", "tools", "say", "rewrite", "spawn", "raise")
REWARDS = (0.0, 1.0, 1.0, None, "steps")
CUT = ("length", "max_response", "max_context", "observation_overflow")
EXECUTED = ("ok", "tool_error", "error", "timeout", "cancelled")
FAILED = ("tool_error", "error", "timeout", "unavailable", "bad_arguments")


class Echo(Tool):
    """Says it again, or refuses."""

    def execute(self, text: str) -> ToolResponse:
        """text: what to say"""
        if text == "no":
            raise ToolError("not today")
        return ToolResponse(text, metrics={"said": 1})


class Telling(ScriptedEngine):
    """Tells of versions, kept ids and counters beside the tokens."""

    def __init__(self, *args: Any, tells: bool, versions: Sequence[Any], **kw: Any):
        super().__init__(*args, **kw)
        self.tells, self.versions = tells, itertools.cycle(versions)
        self.numbers = itertools.count(1)

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        reply = await super().generate(*args, **kwargs)
        count = len(reply.token_ids)
        kept: list[int] = []
        offsets = [0]
        for token in reply.token_ids:
            kept += [int(token), *range(next(self.numbers) % 3)]
            offsets.append(len(kept))
        top_p: Any = {"top_p_token_ids": kept, "top_p_token_offsets": offsets}
        return msgspec.structs.replace(
            reply,
            weight_versions=[(next(self.versions), count)] if count else (),
            top_p=top_p_of(top_p, count) if self.tells else None,
            counters={"prompt_tokens": 10, "cached_tokens": 3},
        )


CODEC = Codec(TOKENIZER, tools=Toolset([Echo]).schemas)


def play(
    steps: Sequence[str],
    replies: Sequence[str],
    rewards: Sequence[Any],
    engine_of: Mapping[str, Any],
    *,
    max_context: int,
    removed: int,
) -> list[Request]:
    replies_of, rewards_of = itertools.cycle(replies), itertools.cycle(rewards)
    todo = itertools.cycle(steps)

    def answer(asked: Asked) -> Any:
        kind = next(replies_of)
        if kind == "error":
            raise EngineError("down", reason=StopReason.ENGINE_ERROR)
        text = {
            "call": CALL,
            "calls": CALL + CALL.replace("hi", "no") + CALL,
            "malformed": "<tool_call>{</tool_call>",
            "unknown": CALL.replace("echo", "nope"),
        }.get(kind, "fine")
        if kind == "aborted":
            return Reply(ids(text)[:2], finish="abort")
        found = ids(text)[: asked.max_new_tokens]
        is_whole = len(found) == len(ids(text)) and kind != "long"
        return Reply(found, finish="stop" if is_whole else "length")

    async def agent(ctx: Context) -> None:
        is_child = ctx.request.is_child
        for _ in range(1 if is_child else 6):
            step = next(todo)
            try:
                if step == "generate" or is_child:
                    await ctx.generate()
                elif step == "tools":
                    await ctx.observe(await ctx.call_tools())
                elif step == "say":
                    await ctx.observe("go on")
                elif step == "rewrite":
                    await ctx.rewrite("again")
                elif step == "spawn":
                    own = Limits(max_context=max_context, max_turns=2, max_attempts=1)
                    await ctx.spawn(
                        "part", agent=agent if next(todo) == "say" else None, limits=own
                    )
                else:
                    raise OSError("no network")
            except RolloutError:
                pass

    def reward(request: Request) -> Any:
        earned = next(rewards_of)
        if earned == "steps":
            return {"step": [0.25] * len(model_turns(request)), "other": 0.5}
        if earned is not None and removed == request.index:
            for sample in request.samples:
                sample.remove_sample = True
        return earned

    engine = Telling(answer, tokenizer=TOKENIZER, **engine_of)
    limits = Limits(max_context=max_context, max_turns=4, max_attempts=2, max_tool_calls=3)
    rollout = Rollout(
        engine, codec=CODEC, tools=[Echo], agent=agent if steps else None, reward=reward,
        limits=limits, max_concurrent=1,
    )  # fmt: skip
    groups = asyncio.run(rollout.generate(["a", "b"], num_samples=2))
    return [request for group in groups for request in group.requests]


def family(request: Request) -> Iterator[Request]:
    yield request
    for child in request.children:
        yield from family(child)


def stats(name: str, values: Sequence[float], *more: str) -> dict[str, float]:
    if not values:
        return {}
    found = {
        "mean": sum(values) / len(values),
        "min": min(values),
        "max": max(values),
        "p50": statistics.median(values),
    }
    if "std" in more:
        found["std"] = statistics.pstdev(values)
    return {f"{name}/{what}": value for what, value in found.items()}


def sampled_in(row: Mapping[str, Any]) -> int:
    return sum(value != 0 for value in row["rollout_log_probs"])


def recount(requests: Sequence[Request]) -> dict[str, float]:
    """What the page of metrics says, from the requests' own fields and their samples as JSON."""
    usable = [r for r in requests if str(r.status) != "aborted"]
    rows = [sample.to_dict() for request in usable for sample in request.rows]
    every = [s.to_dict() for request in requests for one in family(request) for s in one.samples]
    reasons = Counter(str(request.stop_reason) for request in requests)
    aborts = Counter(str(r.stop_reason) for r in requests if str(r.status) == "aborted")
    calls = [call for row in every for turn in row["turns"] for call in turn.get("calls", ())]
    masks = [sum(row["loss_mask"]) * (not row["remove_sample"]) for row in rows]
    sampled = sum(map(sampled_in, every))
    count = len(requests)
    found: dict[str, float] = {
        "rollout/requests": count,
        "rollout/groups": len({request.group_index for request in requests}),
        "rollout/attempts": sum(request.attempt for request in requests),
        "rollout/retries": sum(request.attempt - 1 for request in requests),
        "rollout/abort_rate": sum(aborts.values()) / count,
        "rollout/invalid_calls": sum(o.num_invalid_calls for r in requests for o in family(r)),
        "rollout/rows": len(rows),
        "rollout/removed_rows": sum(row["remove_sample"] for row in rows),
        "rollout/tokens/prompt": sum(row["prompt_length"] for row in rows),
        "rollout/tokens/sampled": sampled,
        "rollout/tokens/trained": sum(masks),
        "rollout/tokens/tool": sum(row["response_length"] - sampled_in(row) for row in rows),
        "rollout/tokens/aborted": sampled - sum(map(sampled_in, rows)),
        **stats("rollout/prompt_length", [row["prompt_length"] for row in rows]),
        **stats("rollout/response_length", [row["response_length"] for row in rows]),
        **stats("rollout/trained_length", masks),
        **stats("rollout/turns", [sum(o.num_turns for o in family(r)) for r in usable]),
        **stats("rollout/tool_calls", [sum(o.num_tool_calls for o in family(r)) for r in usable]),
    }
    for status in ("completed", "truncated", "aborted"):
        found[f"rollout/status/{status}"] = sum(str(r.status) == status for r in requests)
    found |= {f"rollout/stop_reason/{reason}": n for reason, n in reasons.items()}
    found |= {f"rollout/abort/{reason}": n for reason, n in aborts.items()}
    found |= {f"rollout/abort_rate/{reason}": n / count for reason, n in aborts.items()}
    if calls:
        unread = sum(call.get("error") is not None for call in calls)
        found["rollout/malformed_call_rate"] = unread / len(calls)
    if usable:
        cut = [str(r.status) == "truncated" for r in usable]
        found["rollout/truncated_ratio"] = sum(cut) / len(usable)
        met = [str(request.stop_reason) in CUT for request in usable]
        found["rollout/clip_ratio"] = sum(met) / len(usable)
    return found | _rewards(usable) | _replay(rows) | _tools(requests)


def _rewards(usable: Sequence[Request]) -> dict[str, float]:
    given = [request.reward for request in usable if request.reward is not None]
    found: dict[str, float] = {
        "rollout/reward/count": len(given),
        "rollout/reward/missing": len(usable) - len(given),
        **stats("rollout/reward", given, "std"),
    }
    for name in {name for request in usable for name in request.reward_parts}:
        parts = [r.reward_parts[name] for r in usable if name in r.reward_parts]
        found |= stats(f"rollout/reward_part/{name}", parts, "std")
    groups: dict[int, list[float]] = {}
    for request in usable:
        if request.reward is not None:
            groups.setdefault(request.group_index, []).append(request.reward)
    if compared := [rewards for rewards in groups.values() if len(rewards) > 1]:
        same = sum(len(set(rewards)) == 1 for rewards in compared)
        found["rollout/reward/zero_std_groups"] = same / len(compared)
    return found


def _replay(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    versions = [[v for turn in r["turns"] for v, _ in turn["weight_versions"]] for r in rows]
    if known := [version for row in versions for version in row if isinstance(version, int)]:
        found["rollout/weight_version/min"] = min(known)
        found["rollout/weight_version/max"] = max(known)
        found["rollout/weight_version/mixed_rows"] = sum(len(set(row)) > 1 for row in versions)
    kept = []
    for row in rows:
        offsets = row.get("rollout_top_p_token_offsets")
        if offsets is not None and not row["remove_sample"]:
            sizes = [stop - start for start, stop in itertools.pairwise(offsets)]
            kept += [n for n, mask in zip(sizes, row["loss_mask"], strict=True) if mask]
    if kept:
        found["rollout/top_p_kept"] = sum(kept) / len(kept)
    return found


def _tools(requests: Sequence[Request]) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for one in (one for request in requests for one in family(request)):
        session: Any = one.session
        if session is not None:
            calls.update({n: v for n, v in session.by_tool.items() if not n.endswith("/seconds")})
            for name, value in session.metrics.items():
                found[f"tools/{name}"] += value
        for name, value in one.metrics.items():
            if name.startswith("engine/") or name == "said":
                found[name if name.startswith("engine/") else f"tools/{name}"] += value
    for name, value in calls.items():
        found[f"tool/{name}"] += value
        found["tool/echo/calls"] += value
    if total := sum(calls.values()):
        found["tools/failure_rate"] = sum(calls[f"echo/{how}"] for how in FAILED) / total
    if asked := found["engine/prompt_tokens"]:
        found["engine/cache_hit_rate"] = found["engine/cached_tokens"] / asked
    return {name: value for name, value in found.items() if value or name in ALWAYS}


ALWAYS = ("tools/failure_rate", "engine/cache_hit_rate")


@given(
    st.lists(st.sampled_from(STEPS) | st.just("generate"), max_size=9),
    st.lists(st.sampled_from(["text", "call"]) | st.sampled_from(REPLIES), min_size=1, max_size=7),
    st.lists(st.sampled_from(REWARDS), min_size=1, max_size=4),
    st.fixed_dictionaries(
        {
            "tells": st.booleans(),
            "versions": st.lists(st.sampled_from([1, 2, "v", None]), min_size=1, max_size=3),
        }
    ),
    st.integers(260, 900),
    st.integers(-1, 3),
)
def test_every_number_is_what_a_naive_count_finds(
    steps: Sequence[str],
    replies: Sequence[str],
    rewards: Sequence[Any],
    engine_of: Mapping[str, Any],
    max_context: int,
    removed: int,
) -> None:
    requests = play(steps, replies, rewards, engine_of, max_context=max_context, removed=removed)
    metrics = metrics_of(requests)
    times = {name for name in metrics if name.startswith("perf/") or "seconds" in name}
    counted = {name: value for name, value in metrics.items() if name not in times}
    assert counted == pytest.approx(recount(requests))
