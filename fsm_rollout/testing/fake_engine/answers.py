"""Answers: what the fake engine says after a prompt. A pure function of the prompt and the seed.

Nothing is remembered, so a retry, a re-route to another server and a restart all get the same
answer. Which turn it is, the prompt itself tells: with a tokenizer, the openers of assistant
messages in it are counted, and a prompt that ends inside a scripted turn is continued there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from fsm_rollout.errors import ConfigError
from fsm_rollout.testing.fake_engine.model import FakeModel, Sampling
from fsm_rollout.testing.fake_engine.prompt import Prompt

TOOL_CALL = (
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
)


class LogNormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A log-normal by its mean; sigma 0: always the mean."""

    mean: float
    sigma: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.mean < math.inf and 0 <= self.sigma < 10):
            raise ConfigError(f"mean must be >= 0 and sigma in [0, 10), got {self}")

    def draw(self, seed: int | str) -> float:
        if not self.sigma:
            return self.mean
        gauss = random.Random(seed).gauss(0.0, self.sigma)
        return self.mean * math.exp(gauss - self.sigma**2 / 2)


class Answer(NamedTuple):
    """What would be said if nobody interrupted."""

    ids: list[int]
    log_probs: list[float]
    matched: int | None
    """the stop id it ends with; None: it was cut at the limit"""


class Answers:
    """With `script`, turn k says script[k]. Without, the model babbles `tokens` ids per turn, and
    in each of the first `tool_turns` turns it then calls a tool. A stop id ends a turn.
    """

    def __init__(
        self,
        script: Sequence[str | Sequence[int]] | None,
        *,
        tokenizer: Any,
        eos_id: int,
        tokens: LogNormal,
        tool_turns: int,
        tool_call: str,
        seed: int,
    ) -> None:
        has_text = tool_turns > 0 or any(isinstance(turn, str) for turn in script or ())
        if has_text and tokenizer is None:
            raise ConfigError("texts and tool_turns need a tokenizer: FakeEngine(tokenizer=...)")
        if script is not None and (tool_turns or not script):
            raise ConfigError("give a script of one turn or more, or tool_turns, not both")

        def encoded(turn: str | Sequence[int]) -> list[int]:
            if not isinstance(turn, str):
                return list(turn)
            return [*tokenizer.encode(turn, add_special_tokens=False), eos_id]

        self.eos_id = eos_id
        self._script = None if script is None else [encoded(turn) for turn in script]
        self._tool_call = encoded(tool_call)[:-1] if tool_turns else []
        self._tool_turns = tool_turns
        self._tokens = tokens
        self._seed = seed
        self._opener, self._prefill = _opener(tokenizer)

    def answer(
        self,
        prompt: Prompt,
        model: FakeModel,
        sampling: Sampling,
        *,
        limit: int,
        seed: int,
        stop_ids: Sequence[int],
    ) -> Answer:
        """At most `limit` ids. ValueError when the script has no turn for this prompt."""
        last = prompt.last(1)[0]
        hashed = prompt.hash(self._seed ^ seed)
        stop = stop_ids[0] if stop_ids and self.eos_id not in stop_ids else self.eos_id
        if self._script is not None:
            ids = self._scripted(prompt)
            log_probs = model.score(last, ids[:limit], sampling)
        else:
            forced = [*self._forced(prompt), stop]
            count = max(0, round(self._tokens.draw(hashed)) - len(forced))
            ids, log_probs = model.sample(last, min(count, limit), sampling, seed=hashed)
            log_probs += model.score(ids[-1] if ids else last, forced[: limit - len(ids)], sampling)
            ids += forced
        return _cut(ids[:limit], log_probs, {self.eos_id, *stop_ids})

    def _scripted(self, prompt: Prompt) -> list[int]:
        turn, said = self._position(prompt)
        assert self._script is not None
        if turn >= len(self._script):
            raise ValueError(
                f"the script has {len(self._script)} turns, the prompt asks for turn {turn + 1}: "
                "add one to the script, or end the conversation"
            )
        ids = self._script[turn]
        return ids[len(said) :] if ids[: len(said)] == said else ids

    def _forced(self, prompt: Prompt) -> list[int]:
        if not self._tool_turns or self._position(prompt)[0] >= self._tool_turns:
            return []
        return self._tool_call

    def _position(self, prompt: Prompt) -> tuple[int, list[int]]:
        """Which turn the prompt asks for, and what of it the prompt has already."""
        if not self._opener:
            return 0, []
        count, after = prompt.occurrences(self._opener)
        said = prompt.last(after) if count and after else []
        if said[: len(self._prefill)] == self._prefill:
            said = said[len(self._prefill) :]
        return max(0, count - 1), said


def _cut(ids: list[int], log_probs: list[float], stops: set[int]) -> Answer:
    if not stops.isdisjoint(ids):
        end = min(ids.index(stop) for stop in stops if stop in ids) + 1
        return Answer(ids[:end], log_probs[:end], ids[end - 1])
    return Answer(ids, log_probs, None)


def _opener(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that open each assistant message, and what the template adds to the newest only."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return [], []
    asked = [{"role": "user", "content": "a"}]
    answered = [*asked, {"role": "assistant", "content": "b"}]

    def ids(messages: list[dict[str, str]], opened: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    closed, opened, full = ids(asked, False), ids(asked, True), ids(answered, False)
    start = len(closed)
    end = start
    while end < min(len(opened), len(full)) and opened[end] == full[end]:
        end += 1
    return opened[start:end], opened[end:]


def plain_ids(tokenizer: Any, limit: int = 4096) -> list[int]:
    """Ids that read as printable ASCII, never as a control token or a tag: what may be babbled."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    found: list[int] = []
    for token_id in random.Random(0).sample(range(len(tokenizer)), len(tokenizer)):
        text = "" if token_id in special else tokenizer.decode([token_id])
        if text.isascii() and text.isprintable() and text and "<" not in text:
            found.append(token_id)
            if len(found) == limit:
                break
    return found
