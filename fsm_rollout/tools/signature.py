"""Signature: the parameters of one hook of a tool class, and how given values fit them.

tools/schema.py checks with it what a model and a row give. Types are msgspec's: dataclass,
TypedDict, NamedTuple, msgspec.Struct, Enum, Literal, Optional and Union, containers, Annotated with
a msgspec.Meta. Conversion is strict ("3" is not an int) but for what JSON Schema itself equates: 3
is a number and 3.0 is an integer.
"""

from __future__ import annotations

import difflib
import enum
import inspect
import json
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import msgspec

from fsm_rollout.errors import ConfigError
from fsm_rollout.tools.base import Tool

_EMPTY = inspect.Parameter.empty


def why_not_one_argument(function: Callable[..., Any]) -> str:
    """Why a call `function(x)` would fail; empty: it would not, or the function does not say."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, for instance
        return ""
    try:
        signature.bind(None)
    except TypeError:
        bare = [p.replace(annotation=_EMPTY) for p in signature.parameters.values()]
        return f"takes {inspect.Signature(bare)}, which is not one argument"
    return ""


class Signature:
    """The parameters of one hook of a tool class. Raises ConfigError if one cannot be named."""

    def __init__(self, cls: type[Tool], hook: str) -> None:
        self.parameters: dict[str, Parameter] = {}
        self.takes_any = False
        self._self: set[str] = set()
        where = f"tool {cls.name!r}: {hook}"
        if getattr(cls, hook) is getattr(Tool, hook):
            if hook == "execute":
                raise ConfigError(f"{where} is not defined by {cls.__qualname__}")
            return
        bound = inspect.getattr_static(cls, hook).__get__(cls, cls)
        parameters = inspect.signature(bound).parameters.values()
        self._self = {*inspect.signature(getattr(cls, hook)).parameters} - {
            p.name for p in parameters
        }
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
            is_open = self.takes_any and name not in forbidden and name not in self._self
            if name not in known and not is_open:
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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question about the closest of `known`, to be appended to a message; "" if none is close."""
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


def _choices(hint: Any) -> str:
    values: list[Any] = []
    if typing.get_origin(hint) is Literal:
        values = list(typing.get_args(hint))
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        values = [member.value for member in hint]
    return f", must be one of {json.dumps(values, ensure_ascii=False)}" if values else ""


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
