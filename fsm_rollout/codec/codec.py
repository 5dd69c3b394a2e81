"""Codec: chat messages to token ids and token ids to what the model said. Token-in, token-out.

The loop's only way to tokens: the prompt is rendered once, later messages are encoded as the
template's delta, what was sampled is decoded but never encoded again. What always holds: text from
rows, tools and environments never yields a control token, and a codec that was made is proved: it
puts the ids that the template puts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from fsm_rollout.arrays import Ints, int32
from fsm_rollout.codec.delta import Delta
from fsm_rollout.codec.messages import ROLES, Message, checked_messages, map_texts
from fsm_rollout.codec.template import ChatTemplate, tool_call
from fsm_rollout.codec.vocabulary import LONG, Side, Vocabulary
from fsm_rollout.errors import ConfigError, TemplateError
from fsm_rollout.parsers import Parser, detect, get_parser
from fsm_rollout.parsers.watch import FormatWatch
from fsm_rollout.turn import ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PROVED_TOOLS = 4
"""tool results in one turn that are proved at start-up; more are proved when they first occur"""
_LATER = 128
"""sequences of roles first seen later on whose deltas are kept"""
_OTHERS = 32
"""other sets of tools whose codecs are kept"""
_PER_MESSAGE = 16
"""characters that take as long to encode as a message without any"""

_WEATHER: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
"""a tool whose calls the template is asked to write, to see whether the parser reads them"""


class ParsedTurn(msgspec.Struct, frozen=True):
    """What one model turn says."""

    text: str
    """as decoded, without the stop token"""
    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    """every attempt in order, with id and token span"""

    def message(self, *, has_tools: bool) -> Message:
        """The turn as a chat message. Without tools nothing in it is a call: all is content."""
        content = self.content if has_tools or not self.calls else self.text
        message: Message = {"role": "assistant", "content": content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if has_tools and self.calls:
            message["tool_calls"] = [
                tool_call(name=call.name, arguments=call.arguments, id=call.id)
                for call in self.calls
            ]
        return message


class Codec:
    """The codec of one tokenizer, chat template, set of tools and parser.

    `tools` are schemas in OpenAI's form. `parser` is a wire format's name, or a parser.
    `chat_template` is the text of a template or the name of a shipped one (`hermes`); None: the
    tokenizer's. `stop_token_ids`: default, `eos_token_id` of the generation config beside the
    tokenizer's files; the tokenizer's own is added to either.

    Raises TemplateError when the template can't be proved for a user message or, given tools, for
    tool results; ConfigError when the parser can't read the calls that the template writes.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        parser: Parser | str = "hermes",
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_token_ids: int | Iterable[int] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer, stop_token_ids=stop_token_ids)
        template = ChatTemplate(
            tokenizer, self.vocabulary, source=chat_template, tools=tools, kwargs=template_kwargs
        )
        if isinstance(parser, str):
            parser = get_parser(parser, generation_prompt=template.generation_prompt)
        if isinstance(parser, type) or not callable(getattr(parser, "parse", None)):
            raise ConfigError(f"parser is {parser!r}; give a name, or an object with `parse`")
        self.parser = parser
        self._others: dict[str, Codec] = {}
        self._choosing = threading.Lock()  # not the one that the event loop takes for a delta
        self._told: set[str] = set()  # warnings, shared by all of `_others`
        self._take(template)
        if self.drift:
            logger.warning(
                "the chat template rewrites history; sampled tokens stay as they are (%s)",
                self.drift,
            )

    def _take(self, template: ChatTemplate) -> None:
        """Everything that depends on the template and the tools that it shows."""
        self.template, self.tools = template, template.tools
        self._watch = FormatWatch(self.parser.name, self.tools, self._told)
        # What the template adds to a prompt, tool schemas included.
        self._frame = template.render([{"role": "user", "content": "café\n 42 "}])
        self._deltas: dict[tuple[str, ...], Delta] = {}
        self._later: dict[tuple[str, ...], Delta] = {}
        self._compiling = threading.Lock()
        self.prove()
        if self.tools:
            self.check_parser()
            self._warn_of_untold_tools()

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Codec:
        """This codec for other tools, proved as it was. It is kept: asked for again, it is free.

        Raises what making one raises.
        """
        key = json.dumps(tools)
        with self._choosing:
            if key not in self._others:
                other = copy(self)
                other._others, other._choosing = {}, threading.Lock()
                other._take(self.template.with_tools(tools))
                if len(self._others) == _OTHERS:
                    del self._others[next(iter(self._others))]
                self._others[key] = other
            return self._others[key]

    async def with_tools_async(self, tools: Sequence[Mapping[str, Any]]) -> Codec:
        """`with_tools`, in a thread: a proof takes a while."""
        return await _off_loop(True, self.with_tools, tools)

    @property
    def vocab_size(self) -> int:
        """Ids at or above it are out of vocabulary, whatever the model's embedding holds."""
        return self.vocabulary.size

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a model turn."""
        return self.vocabulary.stop_ids

    @property
    def control_ids(self) -> frozenset[int]:
        """Special and added tokens: the template and the model may put them, text may not."""
        return self.vocabulary.control_ids

    @property
    def is_prefix_stable(self) -> bool:
        """The template renders a turn alike while it is the last one and later on."""
        return not self.drift

    @property
    def drift(self) -> str:
        """The two renders that differ when the template rewrites history; '' when it doesn't."""
        return self.template.drift

    # -- messages to ids ---------------------------------------------------------------------------

    def prompt(self, messages: str | Iterable[Mapping[str, Any]]) -> list[int]:
        """The ids of a seed conversation, with the assistant's turn opened.

        A str is one user message. Raises ConfigError, naming message and field.
        """
        checked = self.template.arranged(checked_messages(messages))
        guarded = map_texts(checked, self.vocabulary.guard)
        return self.vocabulary.encode(self.template.render(guarded))

    def delta(
        self, last_id: int | None, messages: Sequence[Mapping[str, Any]], *, room: int | None = None
    ) -> list[int]:
        """The ids that the template puts behind a sampled turn for new tool and user messages.

        `last_id` is the last sampled id (None: nothing was sampled); a turn that the model didn't
        end is ended. Tool messages carry `name` and `tool_call_id`. `room` is how many ids are of
        use: of a delta that is longer, those behind it may be left out, all but one. Raises
        TemplateError when the template can't be proved for this sequence of roles.
        """
        roles = tuple(message.get("role", "") for message in messages)
        delta = self._known(roles) or self._compiled(roles)
        return delta.ids(last_id, messages, room=room)

    async def prompt_async(self, messages: str | Iterable[Mapping[str, Any]]) -> list[int]:
        """`prompt`; a long one is encoded in a thread, so that the event loop goes on."""
        checked = checked_messages(messages)
        size = len(self._frame) + _size(checked)
        return await _off_loop(size > LONG, self.prompt, checked)

    async def delta_async(
        self, last_id: int | None, messages: Sequence[Mapping[str, Any]], *, room: int | None = None
    ) -> list[int]:
        """`delta`; long texts and first proofs go to a thread, so that the event loop goes on."""
        is_new = self._known(tuple(message.get("role", "") for message in messages)) is None
        delta = partial(self.delta, room=room)
        return await _off_loop(is_new or _size(messages) > LONG, delta, last_id, messages)

    def fit(self, text: str, max_tokens: int, *, side: Side) -> str:
        """`text` cut between characters to at most `max_tokens` ids; `side` is what is dropped.

        A cut shows as limits.CUT_MARK where there is room for it. Costs what is kept, not what is
        given.
        """
        return self.vocabulary.fit(text, max_tokens, side=side)

    async def fit_async(self, text: str, max_tokens: int, *, side: Side) -> str:
        """`fit`; a long text is measured in a thread, so that the event loop goes on."""
        fit = partial(self.fit, side=side)
        return await _off_loop(len(text) > LONG, fit, text, max_tokens)

    # -- ids to text and calls ---------------------------------------------------------------------

    def decode(self, ids: Ints) -> str:
        """The text of the ids, control tokens included."""
        return self.vocabulary.decode(ids)

    async def decode_async(self, ids: Ints) -> str:
        """`decode`; many ids are decoded in a thread, so that the event loop goes on."""
        return await _off_loop(len(ids) > LONG, self.decode, ids)

    def pieces(self, ids: Ints) -> list[str]:
        """What each id adds to the text ("" until a character is complete); joined, `decode`."""
        return self.vocabulary.pieces(ids)

    def parse(self, ids: Ints, *, finish: str, call_id: str) -> ParsedTurn:
        """What a whole model turn says. `ids` are its sampled tokens, `finish` the engine's reason.

        The turn's i-th call gets the id `<call_id>_<i>`, unless the format has ids, and its span in
        tokens of the turn.
        """
        ids = int32(ids)
        while len(ids) and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        read = self.vocabulary.detokenizer
        text = read.decode(ids)
        parsed = self.parser.parse(text, finish=finish, tools=self.tools)
        if finish == "stop":
            self._watch.look(text, parsed.calls)
        calls: list[ToolCall] = []
        for call in parsed.calls:
            if not isinstance(call.name, str) or not isinstance(call.arguments, dict):
                raise TypeError(f"parser {self.parser.name!r}: {call!r} needs a str and a dict")
        if parsed.calls:
            spans = read.token_spans(ids, text, parsed.spans)
            calls += [
                msgspec.structs.replace(call, id=call.id or f"{call_id}_{i}", span=span)
                for i, (call, span) in enumerate(zip(parsed.calls, spans, strict=True))
            ]
        return ParsedTurn(text, parsed.reasoning, parsed.content, tuple(calls))

    async def parse_async(self, ids: Ints, *, finish: str, call_id: str) -> ParsedTurn:
        """`parse`; a long turn is read in a thread, so that the event loop goes on."""
        parse = partial(self.parse, finish=finish, call_id=call_id)
        return await _off_loop(len(ids) > LONG, parse, ids)

    # -- proofs at start-up ------------------------------------------------------------------------

    def prove(self) -> None:
        """Prove the prompt, the delta of a user message and, given tools, of 1 to 4 tool results.

        Raises TemplateError that shows what the template puts and what the codec would put.
        """
        text = self._frame
        want, got = self.template.encode(text), self.vocabulary.encode(text)
        if want != got:
            raise TemplateError(
                f"the tokenizer encodes a prompt in a way that the codec doesn't follow: {text!r}\n"
                f"the tokenizer: {want}\nthe codec:     {got}"
            )
        patterns = [("tool",) * n for n in range(1, _PROVED_TOOLS + 1)] if self.tools else []
        for roles in [("user",), *patterns]:
            self._deltas[roles] = Delta(self.template, roles)

    def check_parser(self) -> None:
        """Check that the parser reads the calls that the template writes.

        Raises ConfigError that names the parsers that do. A template that writes no calls says
        nothing about the parser.
        """
        if not self.template.writes_calls:
            return
        call = tool_call(name="get_weather", arguments={"city": "São Paulo", "days": 3})
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = self.template.turn_text(turn, tools=[_WEATHER])
        calls = self.parser.parse(text, finish="stop", tools=[_WEATHER]).calls
        if [{"name": c.name, "arguments": c.arguments} for c in calls] == [call["function"]]:
            return
        able = detect(text, [_WEATHER])
        if self.parser.name not in able:  # else it waits for the end of the reasoning
            advice = f"use parser {' or '.join(map(repr, able))}" if able else "no known parser can"
            raise ConfigError(
                f"parser {self.parser.name!r} can't read the tool calls that the chat template "
                f"writes; {advice}: {text!r}"
            )

    def _warn_of_untold_tools(self) -> None:
        user = [{"role": "user", "content": "u"}]
        with suppress(TemplateError):  # one that refuses to be without tools has read them
            if self.template.render(user) == self.template.render(user, tools=[]):
                self._warn(
                    "the chat template ignores tools, so the model is told of none: describe them "
                    "in the messages, or pass chat_template ('hermes' is shipped)"
                )

    def _warn(self, text: str) -> None:
        """Once, in all codecs `with_tools`."""
        if text not in self._told:
            self._told.add(text)
            logger.warning(text)

    def _known(self, roles: tuple[str, ...]) -> Delta | None:
        return self._deltas.get(roles) or self._later.get(roles)

    def _compiled(self, roles: tuple[str, ...]) -> Delta:
        if wrong := [role for role in roles if role not in ROLES or role == "assistant"]:
            raise ConfigError(f"messages of role {wrong[0]!r} can't follow a sampled turn")
        with self._compiling:
            if roles not in self._later:
                delta = Delta(self.template, roles)
                if len(self._later) == _LATER:
                    del self._later[next(iter(self._later))]
                self._later[roles] = delta
            return self._later[roles]


def _size(messages: Iterable[Mapping[str, Any]]) -> int:
    return sum(_PER_MESSAGE + len(str(message.get("content") or "")) for message in messages)


async def _off_loop(is_long: bool, function: Callable[..., T], *args: Any) -> T:
    if not is_long:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), function, *args)


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """The threads for long texts; a forked process has none of its parent's.

    Two: one works without the GIL while the other has it. More would only take it from the loop.
    """
    return ThreadPoolExecutor(2, thread_name_prefix="fsm-codec")
