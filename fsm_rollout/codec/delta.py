"""Delta: the ids that a chat template puts behind a sampled assistant turn when messages follow.

Compiled once per sequence of roles from one render, in which sentinels stand for what varies, into
constant ids and runs of text; proved against full renders; then filled per turn, at the cost of
encoding the new text. Each run starts right behind a control token, where no merge can reach back.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fsm_rollout.codec.messages import Message, text_of
from fsm_rollout.codec.template import MARK, ChatTemplate, tool_call
from fsm_rollout.errors import TemplateError

PROBES = (
    "42",
    "",
    " padded \n",
    "\n\nlines\n",
    'say "hi" \\ \t {{ x }} {% y %}',
    "café 你好 😀 e\u0301",
    "1" * 70,
    "<b>&amp;</b>\n- a\n- b",
    '{"k": [1, 2.5, null]}',
)
"""contents that a compiled delta must render and encode as the template does"""

_TELLING = '\n  "é\\ \n'
"""a content from which every Change makes something else"""
_FIELDS = {"c": "content", "n": "name", "d": "tool_call_id"}
_DIGITS = string.digits + string.ascii_letters
_SENTINEL = re.compile(r"Zq([cnd])([0-9a-zA-Z]{2})xQzQ")  # nine characters: Mistral checks ids
MAX_MESSAGES = len(_DIGITS) ** 2
"""behind one turn: as many as two digits of a sentinel can number"""

Change: TypeAlias = Callable[[str], str]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _quoted_ascii(text: str) -> str:
    return json.dumps(text)[1:-1]


CHANGES: tuple[Change, ...] = (
    str,
    str.strip,
    str.lstrip,
    str.rstrip,
    lambda text: text.strip("\n"),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
    _quoted,
    _quoted_ascii,
    lambda text: _quoted(text.strip()),
    lambda text: _quoted_ascii(text.strip()),
)
"""what templates do to a message's content"""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a new message, as the template prints it."""

    message: int
    name: str
    change: Change = str

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        value = messages[self.message].get(self.name)
        return self.change(text_of(value) if self.name == "content" else str(value or ""))


@dataclass(frozen=True, slots=True)
class Run:
    """A control token and the text behind it, up to the next control token."""

    control: str
    pieces: tuple[str | Field, ...]

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return "".join(p if isinstance(p, str) else p.text(messages) for p in self.pieces)


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation: a sampled turn and new messages behind it."""

    roles: tuple[str, ...]
    arguments: Literal["object", "json", "none"]
    """how the sampled turn's calls hold their arguments; none: it is text without calls"""
    is_deep: bool
    """there are turns before it"""

    def upto_turn(self) -> list[Message]:
        turn: Message = {"role": "assistant", "content": MARK}
        if self.arguments != "none":
            calls = [
                self._call(_sentinel("n", i), MARK, _sentinel("d", i))
                for i, role in enumerate(self.roles)
                if role == "tool"
            ]
            turn |= {"content": "", "tool_calls": calls}
        return [*(self._earlier() if self.is_deep else []), {"role": "user", "content": "u2"}, turn]

    def _earlier(self) -> list[Message]:
        asked: Message = {"role": "user", "content": "u1"}
        said: Message = {"role": "assistant", "content": "a1"}
        if self.arguments == "none":
            return [asked, said]
        called = {
            "role": "assistant",
            "content": "",
            "tool_calls": [self._call("f", "b", "ZqfirstQz")],
        }
        result = {"role": "tool", "content": "t1", "name": "f", "tool_call_id": "ZqfirstQz"}
        return [asked, called, result, said]

    def _call(self, name: str, value: str, id: str) -> Message:
        given = {"a": value}
        arguments = given if self.arguments == "object" else json.dumps(given)
        return tool_call(name=name, arguments=arguments, id=id)

    def behind_turn(self, contents: Sequence[str]) -> list[Message]:
        messages: list[Message] = []
        for i, role in enumerate(self.roles):
            message = {"role": role, "content": contents[i]}
            if role == "tool":
                message |= {"name": _sentinel("n", i), "tool_call_id": _sentinel("d", i)}
            messages.append(message)
        return messages


class Delta:
    """The delta of one sequence of roles. Raises TemplateError when it can't be proved."""

    def __init__(self, template: ChatTemplate, roles: tuple[str, ...]) -> None:
        if len(roles) > MAX_MESSAGES:
            raise TemplateError(
                f"{len(roles)} messages follow an assistant turn; at most {MAX_MESSAGES} can: "
                "lower Limits.max_new_tokens, so that a turn has room for fewer calls"
            )
        self.roles = roles
        self._template = template
        self._vocabulary = template.vocabulary
        self._sentinels = [_sentinel("c", i) for i in range(len(roles))]
        tails = self._tails()
        first, *others = tails
        self._close, tail = tails[first]
        self._closed_by_next = self._is_closed_by_next(first)
        self._steps = self._compiled(first, tail)
        proofs = [first] * len(PROBES)
        for case in others:
            other = tails[case][1]
            if other == tail:
                proofs.append(case)
            elif case.arguments != "none" or "tool" not in roles:  # else: results of no call, moot
                raise self._refusal("what follows depends on what was said before", tail, other)
        for shift, case in enumerate(proofs):
            self._prove(case, [PROBES[(shift + i) % len(PROBES)] for i in range(len(roles))])

    def ids(
        self, last_id: int | None, messages: Sequence[Mapping[str, Any]], *, room: int | None = None
    ) -> list[int]:
        """The ids behind a turn whose last sampled id is `last_id`; the turn is closed if need be.

        Another stop token than the template's own (`<|endoftext|>`, `<|return|>`) stays as sampled.
        Ids behind the first `room` may be missing, but one that shows that there are more.
        """
        is_closed = last_id == self._vocabulary.control[self._close] or (
            last_id in self._vocabulary.stop_ids and not self._closed_by_next
        )
        most = None if room is None else room + 1 + is_closed
        ids: list[int] = []
        for step in self._steps:
            if isinstance(step, Run):
                ids.append(self._vocabulary.control[step.control])
                left = None if most is None else most - len(ids)
                text = step.text(messages)
                ids += self._vocabulary.encode_after(step.control, text, most=left)
            else:
                ids += step
            if most is not None and len(ids) >= most:
                break
        return ids[1:] if is_closed else ids

    # -- compile -----------------------------------------------------------------------------------

    def _tails(self) -> dict[Case, tuple[str, str]]:
        """Stop token and what follows it, of each case that the template renders in full."""
        tails: dict[Case, tuple[str, str]] = {}
        refusals = []
        for is_deep in (False, True):
            for arguments in ("object", "json", "none"):
                case = Case(self.roles, arguments, is_deep)
                if arguments != "none" and "tool" not in self.roles:
                    continue
                try:
                    _, *tail = self._render(case, self._sentinels)
                except TemplateError as error:
                    refusals.append(str(error))
                else:
                    tails[case] = (tail[0], tail[1])
        if not tails:
            raise self._refusal("\n".join(dict.fromkeys(refusals)))
        return tails

    def _render(
        self, case: Case, contents: Sequence[str], *, tools: Sequence[Any] | None = None
    ) -> tuple[str, str, str]:
        """The text up to the turn's stop token, that token, the text behind it."""
        messages = case.upto_turn() + case.behind_turn(contents)
        text = self._template.render(messages, tools=tools)
        marked = text.rfind(MARK)
        at, stop = self._template.turn_end(text, marked)
        tail = text[at + len(stop) :]
        if marked < 0:
            raise TemplateError(f"the assistant's turn is missing from {text!r}")
        if not stop:
            raise TemplateError(f"no stop token ends the assistant's turn in {text[marked:]!r}")
        counts = Counter(match[0] for match in _SENTINEL.finditer(tail))
        for sentinel in set(contents).intersection(self._sentinels):
            if counts[sentinel] != 1:
                raise TemplateError(
                    f"the content of a new message ({sentinel}) must stand once behind the "
                    f"assistant's stop token {stop!r}: {text[marked:]!r}"
                )
        return text[:at], stop, tail

    def _is_closed_by_next(self, case: Case) -> bool:
        text = self._template.render(case.upto_turn(), opened=False)
        return not self._template.turn_end(text, text.rfind(MARK))[1]

    def _compiled(self, case: Case, tail: str) -> list[list[int] | Run]:
        changes = self._changes(case, tail)
        steps: list[list[int] | Run] = [[]]
        _, *parts = self._vocabulary.split(self._close + tail)
        for control, text in zip(parts[::2], parts[1::2], strict=True):
            if _SENTINEL.search(text):
                steps += [Run(control, tuple(_pieces(text, changes))), []]
            else:
                constant = steps[-1]
                assert isinstance(constant, list)
                constant += self._vocabulary.encode(control + text)
        return [step for step in steps if step]

    def _changes(self, case: Case, tail: str) -> dict[int, Change]:
        """What the template does to the content of each message, seen on a telling one."""
        _, _, told = self._render(case, [_TELLING] * len(self.roles))
        changes: dict[int, Change] = {}
        at = 0
        pieces = list(_pieces(tail, {}))
        for piece, following in zip(pieces, [*pieces[1:], ""], strict=True):
            if isinstance(piece, str) or piece.name != "content":
                at += len(piece if isinstance(piece, str) else _sentinel("n", 0))
                continue
            behind = following if isinstance(following, str) else ""
            fitting = [c for c in CHANGES if told.startswith(c(_TELLING) + behind, at)]
            if not fitting:
                raise self._refusal("it changes the content in an unknown way", told, tail)
            changes[piece.message] = max(fitting, key=lambda change: len(change(_TELLING)))
            at += len(changes[piece.message](_TELLING))
        return changes

    # -- prove -------------------------------------------------------------------------------------

    def _prove(self, case: Case, contents: Sequence[str]) -> None:
        """Up to the stop token + delta is the full render, in ids of the tokenizer itself."""
        # One tool stands for all: the delta was compiled with every schema in the render.
        before, stop, tail = self._render(case, contents, tools=self._template.tools[:1])
        whole = self._template.encode(before + stop + tail)
        head = self._template.encode(before + stop)
        delta = self.ids(head[-1], case.behind_turn(contents))
        if head + delta != whole:
            decode = self._vocabulary.decode
            raise self._refusal(
                f"the compiled delta is wrong for contents {list(contents)!r}",
                f"{decode(whole[len(head) :])!r} {whole[len(head) :]}",
                f"{decode(delta)!r} {delta}",
            )

    def _refusal(self, why: str, *renders: str) -> TemplateError:
        shown = [
            f"\n{label}: {text}"
            for label, text in zip(("the template puts", "instead of"), renders, strict=False)
        ]
        return TemplateError(
            f"the chat template can't be used for messages of ({', '.join(self.roles)}) behind an "
            f"assistant turn: {why}{''.join(shown)}\n{_REMEDY}"
        )


_REMEDY = (
    "Pass another chat_template ('hermes' is shipped and fits every ChatML model), or, when the "
    "turn ends with a token that is no stop token yet, add its id to stop_token_ids."
)


def _sentinel(letter: str, message: int) -> str:
    high, low = divmod(message, len(_DIGITS))
    return f"Zq{letter}{_DIGITS[high]}{_DIGITS[low]}xQzQ"


def _pieces(text: str, changes: Mapping[int, Change]) -> Iterator[str | Field]:
    at = 0
    for match in _SENTINEL.finditer(text):
        if match.start() > at:
            yield text[at : match.start()]
        high, low = map(_DIGITS.index, match[2])
        message = high * len(_DIGITS) + low
        if match[1] == "c":
            yield Field(message, "content", changes.get(message, str))
        else:
            yield Field(message, _FIELDS[match[1]])
        at = match.end()
    if at < len(text):
        yield text[at:]
