"""Toolset: the tools of a run, found and checked once. A session makes the objects.

A tool is given as a class, as a function, by its registered name (built in, or an entry point of
the group `fsm_rollout.tools`), or by a dotted path "module:Name". Dotted paths are imported, so
they are for whoever writes the config; dataset rows only name tools of the toolset, in
`tools_kwargs`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fsm_rollout.errors import ConfigError
from fsm_rollout.tools.base import HOOKS, TRUNCATE_SIDES, Tool, tool
from fsm_rollout.tools.schema import ToolSchema
from fsm_rollout.tools.signature import did_you_mean

BUILT_IN: Mapping[str, str] = {
    "calculator": "fsm_rollout.tools.calculator:Calculator",
    "gsm8k": "fsm_rollout.tools.gsm8k:Gsm8kAnswer",
}
ENTRY_POINTS = "fsm_rollout.tools"
KWARGS = tuple(f"{hook}_kwargs" for hook in HOOKS)

ToolSpec = type[Tool] | Callable[..., Any] | str


class Toolset:
    """Tool classes by name, in the order given. Raises ConfigError for one that could not run."""

    def __init__(self, tools: Sequence[ToolSpec] = ()) -> None:
        if isinstance(tools, str) or not isinstance(tools, Iterable):
            raise ConfigError(f"tools must be a list, got {tools!r}; put the one tool into a list")
        self.classes: dict[str, type[Tool]] = {}
        self._schemas: dict[str, ToolSchema] = {}
        for item in tools:
            cls = find_tool(item)
            _check_class(cls)
            if cls.name in self.classes:
                raise ConfigError(f"two tools are called {cls.name!r}; give one another `name`")
            self.classes[cls.name] = cls
            self._schemas[cls.name] = ToolSchema(cls)

    def __len__(self) -> int:
        return len(self.classes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.classes)

    def __contains__(self, name: object) -> bool:
        return name in self.classes

    def __getitem__(self, name: str) -> ToolSchema:
        return self._schemas[name]

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The OpenAI function schemas for the chat template, in the order of the tools."""
        return [schema.openai for schema in self._schemas.values()]

    def chosen(self, tools: Sequence[ToolSpec]) -> Toolset:
        """Other tools: some of these, by name, and classes or functions. Raises ConfigError."""
        if isinstance(tools, str) or not isinstance(tools, Iterable):
            raise ConfigError(f"tools must be a list, got {tools!r}; put the one tool into a list")
        for name in tools:
            if isinstance(name, str) and name not in self.classes:
                known = ", ".join(self.classes) or "none"
                hint = did_you_mean(name, self.classes)
                raise ConfigError(
                    f"there is no tool {name!r} to choose{hint} (tools: {known}); "
                    "give one that is not among them as a class or function"
                )
        return Toolset([self.classes[t] if isinstance(t, str) else t for t in tools])

    def check_row(self, tools_kwargs: Mapping[str, Any] | None) -> None:
        """Check a row's `tools_kwargs[name].{create,execute,calc_reward,release}_kwargs`.

        Tools that the row leaves out are checked too: they must need no kwargs. Raises ConfigError.
        """
        tools_kwargs = {} if tools_kwargs is None else tools_kwargs
        if not isinstance(tools_kwargs, Mapping):
            raise ConfigError(f"tools_kwargs must be an object, got {type(tools_kwargs).__name__}")
        for name in tools_kwargs:
            if name not in self.classes:
                known = ", ".join(self.classes) or "none"
                hint = did_you_mean(str(name), self.classes)
                raise ConfigError(
                    f"tools_kwargs names no tool of this run: {name!r}{hint} (tools: {known})"
                )
        for name, schema in self._schemas.items():
            for hook, kwargs in hook_kwargs(name, tools_kwargs).items():
                schema.check_kwargs(hook, kwargs)


def hook_kwargs(name: str, tools_kwargs: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What a row gives to each hook of the tool `name`; absent is {}. Raises ConfigError."""
    given = tools_kwargs.get(name)
    given = {} if given is None else given
    where = f"tools_kwargs[{name!r}]"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be an object, got {type(given).__name__}")
    for key in given:
        if key not in KWARGS:
            hint = did_you_mean(str(key), KWARGS)
            raise ConfigError(f"{where} has no field {key!r}{hint} (fields: {', '.join(KWARGS)})")
    found: dict[str, Mapping[str, Any]] = {}
    for hook in HOOKS:
        kwargs = given.get(f"{hook}_kwargs")
        kwargs = {} if kwargs is None else kwargs
        if not isinstance(kwargs, Mapping):
            raise ConfigError(
                f"{where}.{hook}_kwargs must be an object, got {type(kwargs).__name__}"
            )
        found[hook] = kwargs
    return found


def find_tool(item: ToolSpec) -> type[Tool]:
    """The Tool class that `item` is or names. Raises ConfigError."""
    found = _load(item) if isinstance(item, str) else item
    if isinstance(found, type) and issubclass(found, Tool):
        return found
    if inspect.isroutine(found):
        return tool(found)
    if isinstance(found, Tool):
        raise ConfigError(
            f"{type(found).__qualname__}(...) is an object; give its class: each request makes one"
        )
    raise ConfigError(
        f"{item!r} is not a tool; give a subclass of Tool, a function, a registered name "
        "or 'module:Name'"
    )


def where_modules_are(error: BaseException) -> str:
    """What to add to the message of an import that found no module; else ""."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    return f"; modules are looked for in {os.getcwd()} and among what is installed"


def _load(name: str) -> Any:
    """Import a registered name or a dotted path."""
    if ":" in name:
        return _import(name)
    if name in BUILT_IN:
        return _import(BUILT_IN[name])
    from importlib.metadata import entry_points

    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in points:
        known = sorted({*BUILT_IN, *points})
        hint = did_you_mean(name, known)
        raise ConfigError(
            f"no tool is registered as {name!r}{hint} (registered: {', '.join(known)}; "
            "your own: 'module:Name')"
        )
    try:
        return points[name].load()
    except Exception as error:
        raise ConfigError(
            f"tool {name!r} ({points[name].value}) cannot be imported: {error}"
        ) from error


def _import(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"tool {path!r}: cannot import {module_name!r}: {error}{where_modules_are(error)}"
        ) from error
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, vars(module))
        raise ConfigError(f"tool {path!r}: module {module_name!r} has no {attribute!r}{hint}")
    return getattr(module, attribute)


def _check_class(cls: type[Tool]) -> None:
    where = f"tool class {cls.__qualname__}"
    if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cls.name):
        raise ConfigError(f"{where}: name {cls.name!r} must be 1 to 64 letters, digits, '_' or '-'")
    if cls.truncate_side not in TRUNCATE_SIDES:
        raise ConfigError(
            f"{where}: truncate_side must be one of {', '.join(TRUNCATE_SIDES)}, "
            f"got {cls.truncate_side!r}"
        )
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise ConfigError(
            f"{where}: __init__ is called without arguments: {error}; what a request brings goes "
            "to `create`"
        ) from None
    for name in (name for name, value in vars(cls).items() if inspect.isroutine(value)):
        near = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8)
        if name[0] != "_" and near and getattr(cls, near[0]) is getattr(Tool, near[0]):
            raise ConfigError(
                f"{where} has a method {name!r} and no {near[0]!r}: if it is meant, name it so, "
                f"else {'_' + name!r}"
            )
    for field in ("max_concurrent", "max_response_tokens"):
        value = getattr(cls, field)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{where}: {field} must be None or at least 1, got {value!r}")
