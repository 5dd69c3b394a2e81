"""ToolSchema: what a tool's signatures promise to the model that calls it and its rows.

The registry compiles one per tool class. `openai` is the function schema for the chat template;
`validate` fits a model's arguments to `execute`; `check_kwargs` fits a row's kwargs to a hook.
Types are msgspec's: dataclass, TypedDict, NamedTuple, msgspec.Struct, Enum, Literal, Optional and
Union, containers, Annotated with a description or a msgspec.Meta. Conversion is strict ("3" is not
an int) but for what JSON Schema itself equates: 3 is a number and 3.0 is an integer.
"""

from __future__ import annotations

import difflib
import enum
import inspect
import json
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, Literal, cast

import msgspec

from fsm_rollout.errors import ConfigError, ToolError
from fsm_rollout.tools.base import HOOKS, Tool

_MAX_MESSAGE_CHARS = 300
_MAX_FAULTS = 4
_EMPTY = inspect.Parameter.empty
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
        self.name = cls.name
        self._signatures = {hook: Signature(cls, hook) for hook in HOOKS}
        execute = self._signatures["execute"]
        self._visible = [p.name for p in execute.parameters.values() if not p.is_keyword_only]
        self._hidden = [p.name for p in execute.parameters.values() if p.is_keyword_only]
        call_text, texts = read_docstring(cls.execute.__doc__, self._visible)
        class_text, _ = read_docstring(cls.__doc__, self._visible)
        self._is_given = cls.parameters is not None
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
            faults += [f for f in _schema_faults(self.parameters, own, fixed) if f not in faults]
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


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a hook; `type` is Any where the author gave none."""

    name: str
    type: Any
    default: Any
    is_keyword_only: bool

    @property
    def is_required(self) -> bool:
        return self.default is _EMPTY

    @property
    def field_default(self) -> Any:
        """The default as msgspec wants it; only plain values are shown to the model."""
        if self.is_required:
            return msgspec.NODEFAULT
        if self.default is None or isinstance(self.default, (str, int, float, enum.Enum)):
            return self.default
        return msgspec.field(default_factory=lambda: self.default)

    def convert(self, value: Any) -> Any:
        """`value` as the annotation wants it. Raises ValueError naming the parameter."""
        if self.type is Any:
            return value
        try:
            try:
                return msgspec.convert(value, self.type)
            except msgspec.ValidationError:
                return msgspec.convert(_with_integers(value), self.type)
        except msgspec.ValidationError as error:
            fault = str(error)
            raise ValueError(
                f"parameter `{self.name}`: {fault[:1].lower()}{fault[1:]}{_choices(self.type)}"
            ) from None
        except TypeError:  # an annotation that msgspec cannot check: the hook has to
            return value


class Signature:
    """The parameters of one hook of a tool class. Raises ConfigError if one cannot be named."""

    def __init__(self, cls: type[Tool], hook: str) -> None:
        self.parameters: dict[str, Parameter] = {}
        self.takes_any = False
        where = f"tool {cls.name!r}: {hook}"
        if getattr(cls, hook) is getattr(Tool, hook):
            if hook == "execute":
                raise ConfigError(f"{where} is not defined by {cls.__qualname__}")
            return
        bound = inspect.getattr_static(cls, hook).__get__(cls, cls)
        parameters = inspect.signature(bound).parameters.values()
        hints = _hints(bound, {p.name: p.annotation for p in parameters}, where=where)
        for parameter in parameters:
            match parameter.kind:
                case inspect.Parameter.VAR_KEYWORD:
                    self.takes_any = True
                case inspect.Parameter.VAR_POSITIONAL | inspect.Parameter.POSITIONAL_ONLY:
                    raise ConfigError(
                        f"{where}: parameter {parameter.name!r} cannot be given by name"
                    )
                case kind:
                    name = parameter.name
                    hint = hints.get(name, Any)
                    is_keyword_only = kind is inspect.Parameter.KEYWORD_ONLY
                    self.parameters[name] = Parameter(
                        name, hint, parameter.default, is_keyword_only
                    )

    def __str__(self) -> str:
        words = [p.name if p.is_required else f"[{p.name}]" for p in self.parameters.values()]
        return ", ".join([*words, *(["any other"] if self.takes_any else [])]) or "no parameters"

    def faults(
        self, names: Iterable[str], *, expected: Iterable[str], forbidden: Collection[str] = ()
    ) -> Iterator[str]:
        """What is wrong with giving exactly `names`; `expected` are missed if they are required."""
        names = list(names)
        for name in expected:
            if name not in names and self.parameters[name].is_required:
                yield f"missing parameter `{name}`"
        known = [name for name in self.parameters if name not in forbidden]
        for name in names:
            if name in forbidden or not (name in self.parameters or self.takes_any):
                yield f"unknown parameter `{name[:64]}`{did_you_mean(name, known)}"

    def convert(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values as the annotations want them. Raises ValueError naming the parameter."""
        found: dict[str, Any] = {}
        for name, value in values.items():
            if not _is_json(value):
                found[name] = value
                continue
            try:
                own = _copied(value)
            except RecursionError:
                raise ValueError(f"parameter `{name}`: nested too deeply") from None
            known = self.parameters.get(name)
            found[name] = known.convert(own) if known else own
        return found


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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean `x`?" for the closest of `known`, or ""."""
    close = difflib.get_close_matches(word[:64], list(known), n=1)
    return f", did you mean `{close[0]}`?" if close else ""


def _hints(
    hook: Callable[..., Any], annotations: Mapping[str, Any], *, where: str
) -> dict[str, Any]:
    """The annotations of the parameters, strings resolved; the return type does not matter."""
    given = {name: hint for name, hint in annotations.items() if hint is not _EMPTY}
    names = getattr(inspect.unwrap(hook), "__globals__", {})
    try:
        return typing.get_type_hints(
            SimpleNamespace(__annotations__=given), globalns=names, include_extras=True
        )
    except Exception as error:
        raise ConfigError(
            f"{where}: cannot resolve its annotations: {error}; define the types at module level"
        ) from error


def _described(hint: Any, text: str) -> Any:
    """`hint` with a description for msgspec: the string in an Annotated, or `text`."""
    if typing.get_origin(hint) is Annotated:
        text = next((extra for extra in hint.__metadata__ if isinstance(extra, str)), text)
    return Annotated[hint, msgspec.Meta(description=text)] if text else hint


def _choices(hint: Any) -> str:
    values: list[Any] = []
    if typing.get_origin(hint) is Literal:
        values = list(typing.get_args(hint))
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        values = [member.value for member in hint]
    return f", must be one of {json.dumps(values, ensure_ascii=False)}" if values else ""


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


def _copied(value: Any) -> Any:
    """A JSON value that a tool may change: calls are recorded, and rows are shared by a group."""
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value


def _with_integers(value: Any) -> Any:
    """`value` with every integral float as an int."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    return value


def _is_json(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str, list, dict)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 1] + "…"
