"""ToolSchema: what a tool's signatures promise to the model that calls it and to its rows.

The registry compiles one per tool class. `openai` is the function schema for the chat template;
`validate` fits a model's arguments to `execute`; `check_kwargs` fits a row's kwargs to a hook.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, cast

import msgspec

from fsm_rollout.errors import ConfigError, ToolError
from fsm_rollout.tools.base import HOOKS, Tool
from fsm_rollout.tools.signature import Signature, did_you_mean

_MAX_MESSAGE_CHARS = 300
_MAX_FAULTS = 4
_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class ToolSchema:
    """What is known of a tool class before it runs. Raises ConfigError if it cannot be called."""

    def __init__(self, cls: type[Tool]) -> None:
        self.cls = cls
        self.name = cls.name
        self.own_hooks = {hook for hook in HOOKS if getattr(cls, hook) is not getattr(Tool, hook)}
        """those that the class defines"""
        self.async_hooks = {h for h in HOOKS if inspect.iscoroutinefunction(getattr(cls, h))}
        self._signatures = {hook: Signature(cls, hook) for hook in HOOKS}
        execute = self._signatures["execute"]
        self._visible = [p.name for p in execute.parameters.values() if not p.is_keyword_only]
        self._hidden = [p.name for p in execute.parameters.values() if p.is_keyword_only]
        call_text, texts = read_docstring(cls.execute.__doc__, self._visible)
        class_text, _ = read_docstring(cls.__doc__, self._visible)
        self._is_given, self._is_closed = cls.parameters is not None, cls.is_closed
        self.parameters = _given(cls) if self._is_given else self._derived(texts)
        self.openai: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": cls.name,
                "description": cls.description or class_text or call_text,
                "parameters": self.parameters,
            },
        }

    def validate(self, arguments: Any, *, fixed: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The arguments of one `execute`: the model's, checked and converted, and the row's.

        `fixed` are the row's `execute_kwargs`: they win over what the model gives by their names.
        Raises ToolError with the message for the model.
        """
        fixed = fixed or {}
        if not isinstance(arguments, Mapping):
            raise ToolError("arguments must be a JSON object")
        execute = self._signatures["execute"]
        own = {name: value for name, value in arguments.items() if name not in fixed}
        expected = [name for name in self._visible if name not in fixed]
        faults = list(execute.faults(own, expected=expected, forbidden=self._hidden))
        if self._is_given:
            closed = {"additionalProperties": False} if self._is_closed else {}
            found = _schema_faults({**self.parameters, **closed}, own, fixed)
            faults += [fault for fault in found if fault not in faults]
        if faults:
            known = ", ".join(self.parameters.get("properties", ())) or "none"
            raise ToolError(_short(f"{'; '.join(faults[:_MAX_FAULTS])} (parameters: {known})"))
        try:
            return {**execute.convert(own), **fixed}
        except ValueError as error:
            raise ToolError(_short(str(error))) from None

    def check_kwargs(self, hook: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A row's kwargs for `hook`, checked and converted; what is not JSON passes as it is.

        Raises ConfigError naming the tool, the hook and the field.
        """
        where = f"tools_kwargs[{self.name!r}].{hook}_kwargs"
        signature = self._signatures[hook]
        expected = self._hidden if hook == "execute" else signature.parameters
        faults = list(signature.faults(kwargs, expected=expected))
        if faults:
            raise ConfigError(f"{where}: {'; '.join(faults)}; {hook} takes {signature}")
        try:
            return signature.convert(kwargs)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}; {hook} takes {signature}") from None

    def _derived(self, texts: Mapping[str, str]) -> dict[str, Any]:
        fields: list[tuple[str, Any, Any]] = []
        for name in self._visible:
            parameter = self._signatures["execute"].parameters[name]
            hint = _described(parameter.type, texts.get(name, ""))
            try:
                msgspec.json.Decoder(hint)
                msgspec.json.schema(hint)
            except TypeError as error:
                raise ConfigError(
                    f"tool {self.name!r}: no JSON Schema for parameter {name!r} of execute: "
                    f"{str(error).splitlines()[-1]}; use another type or give `parameters`"
                ) from None
            fields.append((name, hint, parameter.field_default))
        struct = msgspec.defstruct(self.name, fields)
        (root,), components = msgspec.json.schema_components([struct])
        schema = components.pop(root["$ref"].removeprefix("#/$defs/"))
        del schema["title"]
        try:
            return cast("dict[str, Any]", _inlined(schema, components, ()))
        except RecursionError:
            return {**schema, "$defs": components}


def read_docstring(text: str | None, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """A docstring's prose and what its `name: text` lines say of the parameters `names`.

    Lines indented deeper than a parameter continue it. `Args:` headings are dropped; reading ends
    at `Returns:`, `Raises:` and the like.
    """
    prose: list[str] = []
    texts: dict[str, str] = {}
    current, indent = "", 0
    for line in inspect.cleandoc(text or "").splitlines():
        word = line.strip()
        depth = len(line) - len(line.lstrip())
        found = re.match(r"(\w+)(?:\s*\([^)]*\))?\s*:\s*(.*)", word)
        if re.fullmatch(r"(Returns|Raises|Yields|Examples?|Notes?):", word):
            break
        if re.fullmatch(r"(Args|Arguments|Parameters):", word):
            continue
        if found and found[1] in names:
            current, indent = found[1], depth
            texts[current] = found[2]
        elif current and word and depth > indent:
            texts[current] = f"{texts[current]} {word}".strip()
        else:
            current = ""
            prose.append(line)
    return "\n".join(prose).strip(), texts


def _described(hint: Any, text: str) -> Any:
    """`hint` with a description for msgspec: the string in an Annotated, or `text`."""
    if typing.get_origin(hint) is Annotated:
        text = next((extra for extra in hint.__metadata__ if isinstance(extra, str)), text)
    return Annotated[hint, msgspec.Meta(description=text)] if text else hint


def _given(cls: type[Tool]) -> dict[str, Any]:
    """The author's JSON Schema, as it is."""
    try:
        schema = json.loads(json.dumps(cls.parameters))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tool {cls.name!r}: `parameters` is not JSON: {error}") from None
    if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
        raise ConfigError(f"tool {cls.name!r}: `parameters` must be a JSON Schema of an object")
    return schema


def _schema_faults(
    schema: Mapping[str, Any], arguments: Mapping[str, Any], fixed: Collection[str]
) -> Iterator[str]:
    """What a given schema says of the arguments at its top level; `execute` checks the rest."""
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments and name not in fixed:
            yield f"missing parameter `{name}`"
    for name, value in arguments.items():
        expected = properties.get(name)
        expected = expected if isinstance(expected, dict) else {}
        if name not in properties and schema.get("additionalProperties") is False:
            yield f"unknown parameter `{name[:64]}`{did_you_mean(name, properties)}"
        elif "type" in expected and not _has_type(value, types := _names(expected["type"])):
            yield f"parameter `{name}`: expected {' or '.join(types)}"
        elif "enum" in expected and value not in expected["enum"]:
            choices = json.dumps(expected["enum"], ensure_ascii=False)
            yield f"parameter `{name}`: must be one of {choices}"


def _names(types: str | list[str]) -> list[str]:
    return [types] if isinstance(types, str) else types


def _has_type(value: Any, names: list[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in names
    if isinstance(value, float) and value.is_integer() and "integer" in names:
        return True
    return any(isinstance(value, _JSON_TYPES.get(name, (object,))) for name in names)


def _inlined(node: Any, components: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """The schema with every $ref in place: templates and XML parsers read `properties` only.

    Raises RecursionError for a type that contains itself.
    """
    if isinstance(node, list):
        return [_inlined(item, components, path) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = node["$ref"].removeprefix("#/$defs/")
        if name in path:
            raise RecursionError(name)
        rest = {key: value for key, value in node.items() if key != "$ref"}
        return {**_inlined(components[name], components, (*path, name)), **rest}
    if "enum" in node and all(isinstance(value, str) for value in node["enum"]):
        node = {"type": "string", **node}
    return {key: _inlined(value, components, path) for key, value in node.items()}


def _short(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 1] + "…"
