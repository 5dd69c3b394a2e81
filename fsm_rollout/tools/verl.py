"""verl's tools as Tools: `BaseTool` objects and `@function_tool` functions, unchanged.

`verl_tool` makes a class of one. Each trajectory then has the full lifecycle: `create` once,
`execute` per call, `calc_reward` once, `release` once, each with its own kwargs from the row; verl
itself creates and releases around every call, and never asks for `calc_reward`. Imports no verl.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from fsm_rollout.errors import ConfigError
from fsm_rollout.tools.base import FunctionTool, Tool, ToolResponse, TruncateSide

_BASE = "verl.tools.base_tool"


class VerlTool(Tool):
    """Drives `base`, the one `BaseTool` object of a run, for one trajectory."""

    base: ClassVar[Any]
    is_closed = True
    """else a name that the model made up would reach `execute` as if the row had given it"""

    async def create(self, **kwargs: Any) -> None:
        """kwargs: the row's; given to `base.create` by name, and as verl does, as create_kwargs."""
        created = await _value(self.base.create(**_both(self.base.create, "create_kwargs", kwargs)))
        self.instance_id = created[0] if isinstance(created, tuple) else created

    async def execute(self, **given: Any) -> ToolResponse:
        """What the schema names are the model's parameters; the rest is from the row."""
        known = (self.parameters or {}).get("properties", {})
        parameters = {name: value for name, value in given.items() if name in known}
        row = {name: value for name, value in given.items() if name not in known}
        kwargs = _both(self.base.execute, "execute_kwargs", row)
        return to_response(await _value(self.base.execute(self.instance_id, parameters, **kwargs)))

    async def release(self, **kwargs: Any) -> None:
        """kwargs: the row's."""
        kwargs = _both(self.base.release, "release_kwargs", kwargs)
        await _value(self.base.release(self.instance_id, **kwargs))


async def _calc_reward(self: VerlTool, **kwargs: Any) -> Any:
    """Only of classes that have one of their own: `BaseTool` says 0.0, which is not "none"."""
    kwargs = _both(self.base.calc_reward, "calc_reward_kwargs", kwargs)
    return await _value(self.base.calc_reward(self.instance_id, **kwargs))


def verl_tool(base: Any, *, truncate_side: TruncateSide = "middle") -> type[Tool]:
    """A Tool class of a `BaseTool` object, or of the `FunctionTool` that `@function_tool` makes.

    Raises ConfigError when it is neither.
    """
    schema = _schema(base)
    attributes: dict[str, Any] = {
        "__module__": type(base).__module__,
        "__doc__": schema.get("description", ""),
        "name": schema["name"],
        "description": schema.get("description", ""),
        "parameters": schema.get("parameters", {"type": "object", "properties": {}}),
        "truncate_side": truncate_side,
    }
    if callable(function := getattr(base, "fn", None)):
        attributes |= {"execute": staticmethod(_answering(function)), "function": function}
        return type(schema["name"], (FunctionTool,), attributes)
    for hook in ("create", "execute", "release"):
        if not callable(getattr(base, hook, None)):
            raise ConfigError(f"{base!r} is no tool of verl: it has no method {hook!r}")
    own = getattr(type(base), "calc_reward", None)
    if own is not None and own.__module__ != _BASE:
        attributes["calc_reward"] = _calc_reward
    return type(type(base).__name__, (VerlTool,), {**attributes, "base": base})


def to_response(value: Any) -> ToolResponse:
    """What a tool of verl returned: a response, or a tuple (response[, reward[, metrics]]).

    A response is verl's `ToolResponse`, a str, a dict, or anything with a str. Metrics that are no
    finite numbers are left out. Raises TypeError for a tuple of another length.
    """
    parts = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"(response, reward, metrics) or less is wanted, got {len(parts)} values")
    response, reward, metrics = [*parts, None, None][:3]
    images: list[Any] = []
    if isinstance(response, dict):
        text = json.dumps(response, ensure_ascii=False)
    elif hasattr(response, "text"):
        text = response.text or ""
        for media in ("image", "video"):
            images += getattr(response, media, None) or ()
    else:
        text = str(response)
    numeric = {name: n for name, n in dict(metrics or {}).items() if _is_number(n)}
    return ToolResponse(text, images=tuple(images), reward=reward, metrics=numeric)


def _schema(base: Any) -> dict[str, Any]:
    schema: Any = getattr(base, "tool_schema", None)
    if hasattr(schema, "model_dump"):
        schema = schema.model_dump(exclude_unset=True, exclude_none=True)
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"{base!r} is no tool of verl: it has no `tool_schema` with a function and its name"
        )
    return dict(function)


def _both(hook: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`kwargs` one by one, and all of them under `name`, as far as `hook` takes them."""
    parameters = inspect.signature(hook).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if takes_any or name in parameters:
        kwargs = {**kwargs, name: dict(kwargs)}
    if name in parameters and not takes_any:
        kwargs = {key: value for key, value in kwargs.items() if key in parameters}
    return dict(kwargs)


def _answering(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def answer(*args: Any, **kwargs: Any) -> ToolResponse:
            return to_response(await function(*args, **kwargs))

        return answer

    @functools.wraps(function)
    def answer_now(*args: Any, **kwargs: Any) -> ToolResponse:
        return to_response(function(*args, **kwargs))

    return answer_now


async def _value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and math.isfinite(float(value))


def verl_tools(
    tools: Sequence[Any], *, truncate_side: TruncateSide = "middle"
) -> dict[str, type[Tool]]:
    """Tool classes by name, of what verl loaded from its tool YAML and function file."""
    classes = [verl_tool(base, truncate_side=truncate_side) for base in tools]
    return {cls.name: cls for cls in classes}
