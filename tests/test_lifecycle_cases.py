"""The handed `lifecycle` cases, driven through the real loop with the scripted engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from fsm_rollout.codec import Codec, ParsedTurn
from fsm_rollout.engines.scripted import Reply, ScriptedEngine
from fsm_rollout.errors import InvariantError
from fsm_rollout.invariants import violations
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.states.machine import Transition
from fsm_rollout.states.table import Event
from fsm_rollout.tools.base import Tool
from fsm_rollout.turn import ToolCall

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "cases" / "lifecycle.jsonl").read_text().splitlines()
]

REASONS = {"prompt_too_long": StopReason.MAX_CONTEXT}
"""names of the case files → ours: a prompt that equals the context is TRUNCATED(max_context)"""

NEEDS_TOOL = ("tool_tokens", "delta", "tool_start")


class IdCodec:
    """A codec whose texts are the ids themselves, as the cases give them."""

    stop_ids = frozenset({9})
    vocab_size = 100

    def __init__(self, case: dict[str, Any]) -> None:
        self.script = case["input"]["script"]
        entries = {entry[0]: entry[-1] for entry in self.script}
        self.open_call = entries.get("text_has_open_call", False)
        self.text = entries.get("text")
        self.wants_tool = [
            self.script[at + 1][0] in NEEDS_TOOL if at + 1 < len(self.script) else False
            for at, entry in enumerate(self.script)
            if entry[0] == "reply" and entry[1]["finish"] != "abort"
        ]
        self.deltas = [
            entry[1] if entry[0] == "tool_tokens" else [i for ids in entry[1].values() for i in ids]
            for entry in self.script
            if entry[0] in ("tool_tokens", "delta")
        ]

    async def prompt_async(self, messages: Any) -> list[int]:
        return [int(token) for token in str(messages).split()]

    async def delta_async(
        self, last_id: int | None, messages: Any, *, room: int | None = None
    ) -> list[int]:
        return list(self.deltas.pop(0))

    async def parse_async(self, ids: list[int], *, finish: str, call_id: str) -> ParsedTurn:
        calls = self.wants_tool.pop(0) or self.open_call
        found = (ToolCall("slow", {}, f"{call_id}_0"),) if calls else ()
        text = self.text or spoken(ids)
        return ParsedTurn(text, "", text, found)

    async def decode_async(self, ids: list[int]) -> str:
        return spoken(ids)


def spoken(ids: list[int]) -> str:
    return " ".join(map(str, ids))


class Play:
    """One case in the making: the loop, the request, and what was seen."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.script = script = case["input"]["script"]
        self.names = [entry[0] for entry in script]
        self.hooks: list[str] = []
        hooks = self.hooks
        self.transitions: list[Transition] = []
        self.tool_started = tool_started = asyncio.Event()
        hangs = "tool_start" in self.names

        class Slow(Tool):
            """Waits, if the case says so."""

            def create(self) -> None:
                hooks.append("create")

            async def execute(self) -> str:
                hooks.append("execute")
                tool_started.set()
                try:
                    await asyncio.sleep(30 if hangs else 0)
                except asyncio.CancelledError:
                    hooks.append("cancelled")
                    raise
                return ""

            def calc_reward(self) -> float:
                hooks.append("calc_reward")
                return 0.0

            def release(self) -> None:
                hooks.append("release")

        self.engine = ScriptedEngine([self._reply(entry[1]) for entry in self._replies()])
        self.codec = IdCodec(case)
        self.loop = Rollout(
            self.engine,
            codec=cast(Codec, self.codec),
            tools=[Slow],
            listeners=[self.transitions.append],
        ).loop
        prompt = " ".join(map(str, script[0][1]))
        self.request = Request(prompt, limits=Limits(**case["input"]["limits"]))

    def _replies(self) -> list[Any]:
        version = 1
        replies = []
        for entry in self.script:
            version += entry[0] == "auto_resume"
            if entry[0] == "reply":
                replies.append(("reply", {**entry[1], "version": f"v{version}"}))
        return replies

    def _reply(self, reply: dict[str, Any]) -> Reply:
        # a stop string ends a turn as a stop token does: ids are the truth
        finish = "stop" if reply["finish"] == "stop_string" else reply["finish"]
        delay_s = 0.05 if "request_sent" in self.names else 0.0
        return Reply(reply["ids"], reply["log_probs"], finish, reply["version"], delay_s)

    async def play(self) -> None:
        """Interpret the script."""
        entries = {entry[0]: entry[-1] for entry in self.script}
        if "append" in entries or "append_eos" in entries:
            await self._append_by_hand(entries)
        elif "abort" in entries:
            await self._abort(entries)
        elif "requeue" in entries or "auto_resume" in entries:
            await self._requeue(entries)
        else:
            await self.loop.play(self.request)
            if entries.get("policy", {}).get("mask_truncated"):
                assert self.request.status is Status.TRUNCATED
                self.request.sample.mask_out()
            await self.loop.release(self.request)
            self.request.seal()

    async def _append_by_hand(self, entries: dict[str, Any]) -> None:
        request, machine = self.request, self.loop.machine
        request.set_prompt(self.script[0][1])
        machine.fire(Event.GENERATE, request)
        reply = entries["reply"]
        request.append_response_tokens(
            reply["ids"], reply["log_probs"], meta_info={"finish_reason": "stop"}
        )
        if "append" in entries:
            before = request.sample.to_dict()
            with pytest.raises(InvariantError, match=r"1 log-probs for 2 tokens"):
                request.append_response_tokens(
                    entries["append"]["ids"], entries["append"]["log_probs"]
                )
            assert request.sample.to_dict() == before
        else:
            request.append_response_tokens([entries["append_eos"]], trainable=False)
            machine.fire(Event.COMPLETE, request, StopReason.STOP)

    async def _abort(self, entries: dict[str, Any]) -> None:
        task = asyncio.create_task(self.loop.run(self.request))
        if "tool_start" in entries:
            await self.tool_started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            while not self.engine.asked:  # noqa: ASYNC110
                await asyncio.sleep(0)
            self.loop.machine.fire(Event.ABORT, self.request, StopReason.CANCELLED)
            await task

    async def _requeue(self, entries: dict[str, Any]) -> None:
        partial = entries.get("requeue", {"partial_rollout": True})["partial_rollout"]
        if partial:
            await self.loop.play(self.request)
            assert self.request.stop_reason is StopReason.ENGINE_ABORT
            if entries.get("requeue", {}).get("mask_offpolicy"):
                self.request.sample.mask_out()
            self.loop.machine.fire(Event.RESUME, self.request)
        await self.loop.run(self.request)

    def seen(self) -> dict[str, Any]:
        """Everything that a case may expect."""
        request, sample = self.request, self.request.sample
        log_probs = sample.rollout_log_probs
        assert log_probs is not None
        order = [hook for hook in self.hooks if hook in ("create", "calc_reward", "release")]
        return {
            "state": request.status.name,
            "tokens": sample.tokens.tolist(),
            "tokens_if_not": sample.tokens.tolist(),  # a late reply is dropped whole
            "loss_mask": sample.loss_mask.tolist(),
            "log_probs": [round(float(value), 6) for value in log_probs],
            "response_length": sample.response_length,
            "reported_length": sample.response_length,
            "total": len(sample.tokens),
            "attempt": request.attempt,
            "versions": [list(run) for run in sample.weight_versions],
            "reason": request.stop_reason,
            "requests_sent": len(self.engine.asked),
            "truncated": request.status is Status.TRUNCATED,
            "tool_executed": self.hooks.count("execute"),
            "tool_cancelled": "cancelled" in self.hooks,
            "release": self.hooks.count("release"),
            "calc_reward": self.hooks.count("calc_reward"),
            "order": order,
            "partial_observation_appended": any(t.kind == "observation" for t in sample.turns),
            "text_matches_ids": sample.response == spoken(sample.columns.response_ids()),
            "invariant_holds": not violations(sample),
        }


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_lifecycle_case(case: dict[str, Any]) -> None:
    async def drive() -> Play:
        play = Play(case)
        await play.play()
        return play

    play = asyncio.run(drive())
    seen = play.seen()
    assert seen["invariant_holds"]
    for key, expected in case["expected"].items():
        match key:
            case "state" if expected == "ABORTED or unchanged":
                assert play.request.status is Status.GENERATING  # unchanged
            case "reason":
                assert seen["reason"] is REASONS[expected]
            case "no_transition_to":
                assert expected not in {t.dest.name for t in play.transitions}
            case "tokens_if_partial":
                pass  # the other branch of tokens_if_not, which we choose
            case "on_ABORTED":
                assert _aborted_hooks(case) == expected
            case "must":  # life-025: ids, mask, log-probs and text are cut together or not at all
                assert seen["text_matches_ids"]
                assert len(seen["loss_mask"]) == len(seen["log_probs"]) == seen["response_length"]
                assert seen["tokens"] == [1, 2, 3, 5, 6, 9]  # nothing is trimmed,
                assert str(play.codec.text) in str(play.request.sample.messages)  # here neither
            case _:
                assert seen[key] == expected, key
    for entry in play.script:
        if entry[0] == "expect_request":
            asked = play.engine.asked[1]
            assert (asked.ids, asked.max_new_tokens) == (
                entry[1]["prompt"],
                entry[1]["max_new_tokens"],
            )


def _aborted_hooks(case: dict[str, Any]) -> dict[str, int]:
    """The same case with a reply that has no log-probs, in every attempt."""
    case = json.loads(json.dumps(case))
    for entry in case["input"]["script"]:
        if entry[0] == "reply":
            entry[1]["log_probs"] = None
    case["input"]["limits"]["max_attempts"] = 1

    async def drive() -> Play:
        play = Play(case)
        await play.loop.run(play.request)
        return play

    play = asyncio.run(drive())
    assert play.request.stop_reason is StopReason.MISSING_LOG_PROBS
    return {hook: play.hooks.count(hook) for hook in ("calc_reward", "release")}
