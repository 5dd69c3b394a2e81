"""Chat messages as rows and users write them, checked and brought to one form.

Called by the codec before it renders. Afterwards `content` is a str, tool calls are
`{id, type, function: {name, arguments: dict}}`, and keys whose value is None are gone: templates
print None, and columnar files fill absent keys with it. ConfigError names message and field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from fsm_rollout.errors import ConfigError

Message: TypeAlias = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(messages: str | Iterable[Mapping[str, Any]]) -> list[Message]:
    """The messages in one form; a str is one user message."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping) or not isinstance(messages, Iterable):
        raise ConfigError(
            f"messages must be a str or a list of messages, not {type(messages).__name__}"
        )
    checked = [_checked(number, message) for number, message in enumerate(messages)]
    if not checked:
        raise ConfigError("messages is empty: give at least one message")
    return checked


def text_of(content: object) -> str:
    """The text of a message's `content`: a str, None, or a list of text parts.

    Raises ConfigError for anything else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping) or not isinstance(content, Iterable):
        raise ConfigError(f"must be a str or a list of text parts, not {type(content).__name__}")
    return "".join(map(_part, content))


def map_texts(messages: Iterable[Message], change: Callable[[str], str]) -> list[Message]:
    """Checked messages with `change` applied to every text in them, roles and types aside."""
    return [_mapped(message, change) for message in messages]


def _checked(number: int, message: Mapping[str, Any]) -> Message:
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where} must be a mapping, not {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ConfigError(f"{where}, field 'role': {role!r} is not one of {', '.join(ROLES)}")
    if "content" not in message and not (role == "assistant" and message.get("tool_calls")):
        raise ConfigError(
            f"{where} has no 'content': it has {', '.join(map(str, message))}; an empty one is ''"
        )
    checked = {key: value for key, value in message.items() if value is not None}
    try:
        checked["content"] = text_of(message.get("content"))
    except ConfigError as error:
        raise ConfigError(f"{where}, field 'content': {error}") from None
    calls = checked.pop("tool_calls", ())
    if not isinstance(calls, Iterable) or isinstance(calls, str | Mapping):
        raise ConfigError(f"{where}, field 'tool_calls' must be a list, not {type(calls).__name__}")
    if calls := [
        _checked_call(f"{where}, field 'tool_calls[{i}]'", call) for i, call in enumerate(calls)
    ]:
        checked["tool_calls"] = calls
    return checked


def _mapped(message: Message, change: Callable[[str], str]) -> Message:
    keep = ("role", "type", "tool_calls")
    mapped = {k: v if k in keep else _mapped_value(v, change) for k, v in message.items()}
    if "tool_calls" in message:
        mapped["tool_calls"] = [
            _mapped(call, change) | {"function": _mapped(call["function"], change)}
            for call in message["tool_calls"]
        ]
    return mapped


def _mapped_value(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with `change` applied to every str in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped_value(k, change): _mapped_value(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped_value(item, change) for item in value]
    return value


def _checked_call(where: str, call: Mapping[str, Any]) -> Message:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{where}: a call needs a function with a name, got {call!r}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ConfigError(f"{where}: arguments is not JSON ({error}): {arguments!r}") from None
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{where}: arguments must be a JSON object, got {arguments!r}")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ConfigError(f"a part of type {kind!r} is not text; only text parts can be encoded")
