"""ChatTemplate: a Hugging Face chat template as the codec sees it.

It renders conversations to text and finds out, once, how the template wants its input: arguments of
tool calls as object or as JSON text, reasoning apart from the content, and whether it rewrites
history (`drift`).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from itertools import takewhile, zip_longest
from typing import TYPE_CHECKING, Any, Literal

from fsm_rollout.codec.messages import Message
from fsm_rollout.codec.vocabulary import Vocabulary
from fsm_rollout.errors import ConfigError, TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "ZqmarkxQz"
"""stands for what an assistant said; letters only, so that no template changes it"""
_USER: Message = {"role": "user", "content": "u1"}
_NEXT: Message = {"role": "user", "content": "u2"}
_CALL_ID = "ZqcallxQz"  # nine characters: Mistral checks the length
_RESULT: Message = {"role": "tool", "content": "t1", "name": "f", "tool_call_id": _CALL_ID}
_REASONING = re.compile(r"(?:\s*<think>)?(.*?)</think>(.*)", re.DOTALL)


@cache
def shipped_template(name: str) -> str:
    """The text of a chat template that the package ships: `hermes`. ConfigError for other names."""
    folder = files("fsm_rollout.codec") / "templates"
    names = sorted(file.name.removesuffix(".jinja") for file in folder.iterdir())
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"unknown chat template {name!r}: {hint}shipped are {', '.join(names)}")
    return (folder / f"{name}.jinja").read_text("utf-8")


class ChatTemplate:
    """Renders messages with one tokenizer, template and set of tools.

    `source` is the text of a template, the name of a shipped one, or None for the tokenizer's own.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: Vocabulary,
        *,
        source: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if source is not None and not isinstance(source, str):
            raise ConfigError(f"chat_template is {source!r}; give its text, or a shipped name")
        if source is not None and "{" not in source:
            source = shipped_template(source)
        if source is None and not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template: pass chat_template ('hermes' is shipped)"
            )
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.tools = tuple(tools)
        self._source = source
        self._kwargs = dict(kwargs or {})
        self._arguments = self._argument_form()
        self._reads_reasoning = self._takes_reasoning_apart()
        self.generation_prompt = self._generation_prompt()
        """the text that opens an assistant turn"""
        self.drift = self._find_drift()
        """the two renders when the template rewrites an assistant turn later on, else ''"""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """The same template for other tools."""
        return ChatTemplate(
            self.tokenizer,
            self.vocabulary,
            source=self._source,
            tools=tools,
            kwargs=self._kwargs,
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        opened: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation; `opened`: with the next assistant turn opened.

        `tools` stands in for the template's own. Raises TemplateError when the template refuses.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=[dict(tool) for tool in (self.tools if tools is None else tools)] or None,
                chat_template=self._source,
                add_generation_prompt=opened,
                tokenize=False,
                **self._kwargs,
            )
        except Exception as error:  # a template is foreign code and raises what it likes
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(
                f"the chat template refused a conversation of ({roles}): "
                f"{type(error).__name__}: {error}"
            ) from error
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> list[int]:
        """The ids that the tokenizer itself makes of a render: what the codec is proved against."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def arranged(self, messages: Sequence[Message]) -> list[Message]:
        """Checked messages as the template reads them; ConfigError for calls it would drop."""
        return [
            self._arranged(message, number) if message["role"] == "assistant" else message
            for number, message in enumerate(messages)
        ]

    @property
    def writes_calls(self) -> bool:
        """Tool calls of an assistant's turn are in its render."""
        return self._arguments is not None

    def turn_text(self, turn: Message, *, tools: Sequence[Mapping[str, Any]]) -> str:
        """What the template writes for an assistant's turn, with its opener, without its end."""
        before = self.render([_USER], opened=False, tools=tools)
        messages = self.arranged([_USER, turn])
        text = self.render(messages, opened=False, tools=tools).removeprefix(before)
        at, stop = self.turn_end(text, 0)
        return text[:at] if stop else text

    def turn_end(self, text: str, start: int) -> tuple[int, str]:
        """Where the first stop token behind `start` begins, and its spelling; (-1, '') if none."""
        control, stop_ids = self.vocabulary.control, self.vocabulary.stop_ids
        stops = [token for token, i in control.items() if i in stop_ids]
        found = [(at, stop) for stop in stops if (at := text.find(stop, start)) >= 0]
        return min(found, default=(-1, ""))

    def _arranged(self, message: Message, number: int) -> Message:
        message = dict(message)
        if "tool_calls" in message and not self.writes_calls:
            raise ConfigError(
                f"message {number}, field 'tool_calls': the chat template writes no tool calls; "
                "pass chat_template ('hermes' is shipped)"
            )
        if "tool_calls" in message and self._arguments == "json":
            message["tool_calls"] = [_with_json_arguments(call) for call in message["tool_calls"]]
        apart = "reasoning_content" in message or not self._reads_reasoning
        if not apart and (match := _REASONING.match(message["content"])):
            message["reasoning_content"] = match[1].strip("\n")
            message["content"] = match[2].lstrip("\n")
        return message

    # -- what the template wants -------------------------------------------------------------------

    def _argument_form(self) -> Literal["object", "json"] | None:
        """How calls must hold their arguments; None when the template writes no calls."""
        call = tool_call(name="f", arguments={"a": MARK})
        forms: list[tuple[Literal["object", "json"], Message]]
        forms = [("object", call), ("json", _with_json_arguments(call))]
        for form, call in forms:
            conversation = [_USER, _assistant(tool_calls=[call]), _RESULT]
            for length in (2, 3):  # a template may insist on a result behind a call
                with suppress(TemplateError):
                    if MARK in self.render(conversation[:length], opened=False):
                        return form
        return None

    def _takes_reasoning_apart(self) -> bool:
        """It makes the same of `<think>` in the content and of `reasoning_content`."""
        inside = _assistant(content="<think>r1</think>a1")  # no template leaves it that close
        apart = _assistant(content="a1", reasoning_content="r1")
        try:
            return all(
                self.render([_USER, inside, *more]) == self.render([_USER, apart, *more])
                for more in ([], [_NEXT])
            )
        except TemplateError:
            return False

    def _generation_prompt(self) -> str:
        opened = self.render([_USER])
        unopened = self.vocabulary.split(self.render([_USER], opened=False))
        parts = zip_longest(self.vocabulary.split(opened), unopened)
        prompt = "".join(part or "" for part, other in parts if part != other)
        said = self.render([_USER, _assistant(content=MARK)], opened=False)
        opening = said[len(opened) : said.find(MARK)]
        if not prompt and said.startswith(opened) and opening.strip():
            raise TemplateError(
                "the chat template ignores add_generation_prompt: behind a user message comes "
                f"{opening!r} before what the assistant says, and the template never puts it"
            )
        return prompt

    def _find_drift(self) -> str:
        turns = [
            _assistant(content="a1"),
            _assistant(content="<think>\nr1\n</think>\n\na1"),
        ]
        if self.writes_calls:
            call = tool_call(name="f", arguments={"a": "b"})
            turns += self.arranged([_assistant(tool_calls=[call])])
        for turn in turns:
            after = _RESULT if "tool_calls" in turn else _NEXT
            try:
                first = self.render([_USER])
                last = self._upto_end([_USER, turn], behind=len(first))
                later = self.render([_USER, turn, after], opened=False)
            except TemplateError:
                continue  # a turn that the template refuses can't drift
            if not last.startswith(first):
                return _both("when the turn is generated", first, "when it is rendered", last)
            if not later.startswith(last):
                return _both("while the turn is the last", last, "when another follows", later)
        return ""

    def _upto_end(self, messages: list[Message], *, behind: int) -> str:
        text = self.render(messages, opened=False)
        at, stop = self.turn_end(text, behind)
        return text[: at + len(stop)] if stop else text.rstrip()


def tool_call(*, name: str, arguments: Any, id: str = _CALL_ID) -> Message:
    """A tool call in OpenAI's form."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _assistant(*, content: str = "", **rest: Any) -> Message:
    return {"role": "assistant", "content": content, **rest}


def _with_json_arguments(call: Message) -> Message:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _both(first_when: str, first: str, later_when: str, later: str) -> str:
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(first, later, strict=False))
    at = max(0, sum(1 for _ in alike) - 40)
    return f"{first_when}: ...{first[at:]!r}; {later_when}: ...{later[at:]!r}"
