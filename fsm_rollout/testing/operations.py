"""Operations: what a loop, an engine, a tool or a policy does to a request, right and wrong.

Methods of a Twin with plain arguments, which `machines` draws.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import numpy as np

from fsm_rollout.errors import InvariantError
from fsm_rollout.invariants import violations
from fsm_rollout.limits import TERMINAL, Status, StopReason
from fsm_rollout.sample import Sample
from fsm_rollout.states.table import Event
from fsm_rollout.testing.faults import FAULTS, Arguments, Reply, Setup, replay_data, wrapped
from fsm_rollout.testing.reference import Origin, Token
from fsm_rollout.testing.snapshot import sample_snapshot, snapshot
from fsm_rollout.testing.tampering import refused_events
from fsm_rollout.testing.twin import Tools, Twin
from fsm_rollout.turn import Media, ToolCall


class Player(Twin):
    """A Twin with everything that may happen to a request."""

    _next_id = 0
    _calls = 0

    def start(self, setup: Setup) -> None:
        super().start(setup)
        self._asked: list[tuple[int, int]] = []

    def renew(self, setup: Setup) -> None:
        """A new request in place of one that has ended."""
        if self.request.is_done:
            self.start(setup)

    # -- tokens ------------------------------------------------------------------------------------

    def sampled(self, reply: Reply) -> None:
        """Model tokens in any status."""
        self._append(reply, "sampled")

    def observed(self, reply: Reply) -> None:
        """Observation tokens in any status."""
        self._append(reply, "observed")

    def forced(self, reply: Reply) -> None:
        """Tokens that we put into a model turn, in any status."""
        self._append(reply, "forced")

    def image(self, length: int) -> None:
        """An observation of placeholder ids for one image."""
        reference = self.reference
        if reference.status not in TERMINAL and length <= reference.room:
            start = reference.length
            self._append(Reply(length), "observed")
            self.request.sample.media.append(Media(start, length, "image"))
            reference.media.append((start, length))

    def _append(self, reply: Reply, origin: Origin) -> bool:
        tokens, start = self._tokens(reply, origin), 0
        for size in reply.sizes():
            chunk = tokens[start : start + size]
            start += size
            if not self._append_chunk(reply, chunk, origin, is_last=start == len(tokens)):
                return False
        return True

    def _append_chunk(
        self, reply: Reply, tokens: list[Token], origin: Origin, *, is_last: bool
    ) -> bool:
        reference, sample = self.reference, self.request.sample
        arguments = self._arguments(reply, tokens, origin)
        arguments["update_terminal_info"] = is_last
        rows = None
        if self.setup.replay and origin == "sampled":
            length = reference.length + len(tokens)
            self._calls += 1
            rows = [(7 * at + self._calls) % 101 for at in range(length - 1)]
            held = len(reference.rows or ()) if reply.annotated else 0
            kept = [token.kept for token in tokens]
            arguments["meta_info"] |= replay_data(reply.form, kept, rows[held:], held)
        text, codes, fault = arguments["text"], set[str](), "none"
        if reference.status in TERMINAL:
            codes.add("R3.closed")
        if len(tokens) > reference.room:
            fault = "more than fits"
            codes.add("R3.5.room")
        if is_last and reply.fault != "none":
            fault = reply.fault
            codes |= FAULTS[fault].codes
            FAULTS[fault].spoil(arguments)
        arguments = wrapped(arguments, reply.form)
        ids = arguments.pop("tokens")
        accepted = self.attempt(
            lambda: sample.append_response_tokens(ids, **arguments),
            codes,
            f"append {origin}",
            fault,
        )
        if accepted:
            ends = is_last and origin != "observed"
            reference.append(tokens, reply.finish if ends else None, text, rows)
        return accepted

    def _tokens(self, reply: Reply, origin: Origin) -> list[Token]:
        start, early = self._next_id, reply.count // 2
        self._next_id += reply.count
        has_log_prob = origin == "sampled" and self.setup.log_probs
        return [
            Token(
                id=start + n,
                origin=origin,
                log_prob=-(n % 37) / 4 if has_log_prob else 0.0,
                version=reply.versions[n >= early],
                extra={
                    column.name: (start + n) % 5 if reply.annotated else column.fill
                    for column in self.setup.declared
                },
                trained=origin == "sampled",
                kept=self._kept(start + n) if origin == "sampled" else (),
            )
            for n in range(reply.count)
        ]

    def _kept(self, id: int) -> tuple[int, ...]:
        return (id + 1, id, id + 2)[: 2 + id % 2] if self.setup.replay else ()

    def _arguments(self, reply: Reply, tokens: list[Token], origin: Origin) -> Arguments:
        arguments: Arguments = {
            "tokens": [token.id for token in tokens],
            "trainable": origin == "sampled",
            "forced": origin == "forced",
            "meta_info": {"finish_reason": reply.finish},
            "text": "".join(f"{token.id} " for token in tokens) if reply.annotated else None,
            "extra": {},
        }
        if reply.annotated:
            arguments["extra"] = {
                column.name: [token.extra[column.name] for token in tokens]
                for column in self.setup.declared
            }
        if origin == "sampled":
            versions = [token.version for token in tokens]
            arguments["meta_info"] |= {
                "weight_version": reply.versions[1],
                "weight_versions": [(v, versions.count(v)) for v in dict.fromkeys(versions)],
                "temperature": 1.0,
            }
            if self.setup.log_probs:
                arguments["log_probs"] = [token.log_prob for token in tokens]
        return arguments

    # -- the loop, a step at a time ----------------------------------------------------------------

    def play(self, reply: Reply) -> None:
        """What the loop does next; the reply's fault is that of the engine."""
        reference = self.reference
        match reference.status:
            case Status.PENDING if reference.allows("needs_observation"):
                self.settle(Event.OBSERVE, None)
            case Status.PENDING:
                self.settle(Event.GENERATE, None)
            case Status.GENERATING:
                self._deliver(reply)
            case Status.TOOL_CALLING:
                self._observe(reply)
            case Status.ABORTED if all(map(reference.allows, ("resumable", "tools_alive"))):
                self.fire(Event.RESUME, None)
            case Status.ABORTED if all(map(reference.allows, ("retryable", "attempts_left"))):
                self.fire(Event.RETRY, None)
            case Status.COMPLETED | Status.TRUNCATED if (
                reply.finish == "abort" and not reference.is_sealed
            ):
                self.fire(Event.ABORT, StopReason.REWARD_ERROR)
            case _ if not reference.is_sealed:
                self.seal(1.0)
            case _:
                self.start(self.setup)

    def play_on(self, answers: list[Reply]) -> None:
        """Several steps of the loop, so that deep states are reached."""
        for reply in answers:
            self.play(reply)

    def ask(self) -> None:
        """Send something whose answer comes later, perhaps too late, perhaps twice."""
        if self.request.status in (Status.GENERATING, Status.TOOL_CALLING):
            self._asked.append((self.request.seq, self.reference.moves))

    def answer(self, which: int, reply: Reply) -> None:
        """An answer to any question so far; the seq fence must know a late one."""
        if self._asked:
            seq, moves = self._asked[which % len(self._asked)]
            is_late = moves != self.reference.moves
            assert (self.request.seq != seq) is is_late, "the fence lets a late reply pass"
            if is_late:
                self.count(f"answer in {self.request.status.name}", "late")
            else:
                self.play(reply)

    def _deliver(self, reply: Reply) -> None:
        reference, finish = self.reference, reply.finish or "stop"
        count = max(0, min(reply.count, self.request.max_new_tokens))  # an open turn may be longer
        fault = reply.fault if count >= 2 else "none"
        if not self._append(replace(reply, count=count, fault=fault, finish=finish), "sampled"):
            missing = fault.startswith("log-probs missing")
            reason = StopReason.MISSING_LOG_PROBS if missing else StopReason.BAD_REPLY
            return self.fire(Event.ABORT, reason)
        if finish == "stop":
            self.attach(reply.calls)
        if finish == "abort":
            self.fire(Event.ABORT, StopReason.ENGINE_ABORT)
        elif finish != "stop":
            self.settle(Event.TRUNCATE, _CUT[finish])
        elif reference.turns[-1].calls:
            self.settle(Event.OBSERVE, None)
        else:
            self.settle(Event.COMPLETE, StopReason.STOP)

    def _observe(self, reply: Reply) -> None:
        """As much of a tool's answer as fits; what does not fit ends the request.

        For tools, finish "abort" is a pause while they run, None a tool that ends the request.
        """
        if reply.finish == "abort":
            return self.fire(Event.ABORT, StopReason.PAUSED)
        fits = min(reply.count, self.request.room)
        self._append(replace(reply, count=fits, fault="none"), "observed")
        self.tool_calls(1, 0)
        if reply.count > fits:
            assert self.request.room == 0
            self._faults.add("observation larger than the room")
            self.settle(Event.TRUNCATE, StopReason.OBSERVATION_OVERFLOW)
        elif reply.finish is None:
            self.settle(Event.COMPLETE, StopReason.TOOL_STOP)
        else:
            self.settle(Event.GENERATE, None)

    # -- around the tokens -------------------------------------------------------------------------

    def attach(self, calls: tuple[ToolCall, ...]) -> None:
        """The last turn made these calls."""
        turns = self.request.sample.turns
        if turns and turns[-1].calls != calls and not self.reference.is_sealed:
            turns[-1].calls = self.reference.turns[-1].calls = calls
            self.count(f"calls in {self.request.status.name}", f"{len(calls)} calls")

    def tool_calls(self, executed: int, invalid: int) -> None:
        """Calls were executed or answered as invalid."""
        if not self.request.is_done:
            self.request.num_tool_calls += executed
            self.request.num_invalid_calls += invalid
            self.reference.num_tool_calls += executed
            self.reference.num_invalid_calls += invalid
            self.count(f"tool calls in {self.request.status.name}", "none")

    def tools(self, alive: bool) -> None:
        """The tool session is opened or released."""
        if not self.reference.is_sealed and self.reference.alive is not alive:
            self.request.session, self.reference.alive = Tools(alive), alive
            self.count(f"tools in {self.request.status.name}", "alive" if alive else "released")

    def give_up(self) -> None:
        """An error after which no retry can help."""
        if not self.reference.final:
            self.request.final = self.reference.final = True
            self.request.error = "HTTP 400"
            self.count(f"error in {self.request.status.name}", "final")

    def note(self) -> None:
        """Tools, rewards and clocks write their fields."""
        sample = self.request.sample
        if not self.reference.is_sealed:
            sample.extra["attempts"], sample.reward, sample.reward_parts = 1, 0.5, {"tool": 0.5}
            sample.remove_sample, sample.non_generation_time = True, 0.25
            self.request.reward, self.request.reward_parts = 0.5, {"tool": 0.5}
            self.request.metrics = {"tool_errors": 1.0}
            self.count(f"note in {self.request.status.name}", "none")

    # -- cuts and ends -----------------------------------------------------------------------------

    def truncate(self, percent: int) -> None:
        """Keep a part of the response; below 0 and above 100 there is none."""
        reference, sample, kept = self.reference, self.request.sample, list[int]()
        keep = self._part(percent)
        in_range = 0 <= keep <= len(reference.tokens)
        codes = {"R3.closed"} if reference.is_sealed else {"R3.1.truncate"}
        if self.attempt(
            lambda: kept.append(sample.truncate(keep)),
            () if in_range and not reference.is_sealed else codes,
            "truncate",
        ):
            assert kept == [reference.truncate(keep)]

    def mask_out(self, percent: int, to_percent: int | None) -> None:
        """Untrain a part of the response, or one that it has not."""
        reference, sample = self.reference, self.request.sample
        start = self._part(percent)
        stop = None if to_percent is None else self._part(to_percent)
        end = len(reference.tokens) if stop is None else stop
        in_range = 0 <= start <= end <= len(reference.tokens)
        codes = {"R3.closed"} if reference.is_sealed else {"R3.1.mask_out"}
        if self.attempt(
            lambda: sample.mask_out(start, stop),
            () if in_range and not reference.is_sealed else codes,
            "mask_out",
        ):
            for token in reference.tokens[start:end]:
                token.trained = False

    def _part(self, percent: int) -> int:
        length = len(self.reference.tokens)
        return length * percent // 100 if 0 <= percent <= 100 else percent - 100 + length

    def reset(self) -> None:
        """Forget the response without a retry."""
        codes = {"R3.closed"} if self.reference.is_sealed else ()
        if self.attempt(self.request.sample.reset, codes, "reset"):
            self.reference.reset()
            if self.reference.closed:  # a fork begins where nothing else does
                return
            before_anything = self.fresh().sample
            assert sample_snapshot(self.request.sample) == sample_snapshot(before_anything)

    def set_prompt(self, prompt: int) -> None:
        """A prompt that comes again, too late, or is too long."""
        reference = self.reference
        is_early = reference.status is Status.PENDING and not reference.length
        codes = () if is_early else {"R3.closed"}
        if is_early and prompt > reference.limits.max_context:
            codes = {"R3.5.prompt"}
        ids = list(range(prompt))
        if self.attempt(lambda: self.request.set_prompt(ids), codes, "set_prompt"):
            reference.prompt = ids

    def fork(self, percent: int) -> None:
        """History is rewritten: a new row whose context is the first part of this one."""
        request, reference = self.request, self.reference
        keep = reference.length * percent // 100
        ids = [*reference.prompt, *(token.id for token in reference.tokens)][:keep]
        codes = set[str]()
        if reference.is_sealed or reference.status in TERMINAL or not reference.turns:
            codes.add("R3.closed")
        elif reference.has_open_turn:
            codes.add("R3.4.fork")
        closed = request.sample
        media = [span for span in closed.media if span.start + span.length <= keep]
        if self.attempt(lambda: request.fork(ids, media=media), codes, "fork"):
            reference.fork(ids)
            before = snapshot(request)
            with suppress(InvariantError):
                closed.append_response_tokens([1], trainable=False)
                raise AssertionError("a closed row was written")
            assert snapshot(request) == before

    def seal(self, reward: float | None) -> None:
        """Record the outcome, once, when there is one."""
        request, reference = self.request, self.reference
        codes = {"R3.closed"} if reference.is_sealed else {"R3.6.seal"}
        if reference.is_sealed or reference.status not in TERMINAL:
            self.attempt(request.seal, codes, "seal")
            return
        request.reward = reward
        if reference.status is Status.ABORTED:
            reward = None
        self.attempt(request.seal, (), "seal")
        reference.is_sealed = True
        assert all((s.reward, s.request) == (reward, None) for s in request.samples)
        sample = request.sample
        if sample.columns.length:
            assert np.shares_memory(sample.tokens, sample.tokens)
            assert not sample.tokens.flags.writeable

    def at_rest(self) -> None:
        """Write the sample down and read it back."""
        sample, before = self.request.sample, snapshot(self.request)
        row = sample.to_dict()
        again = Sample.from_dict(json.loads(json.dumps(row)))
        assert again.to_dict() == row
        assert violations(again) == [] or (sample.status in TERMINAL and not sample.is_sealed)
        assert np.array_equal(again.sampled, sample.sampled)
        assert snapshot(self.request) == before

    def tamper(self, kind: str) -> None:
        """Break an invariant by force, on a copy: only `abort` and `retry` lead on from there."""
        status = self.request.status.name
        for event in refused_events(kind, self.request, self.fresh().sample):
            self.count(f"fire {event} in {status}", kind)


_CUT = {"length": StopReason.LENGTH, "repetition": StopReason.REPETITION}
