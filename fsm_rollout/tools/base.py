"""Tool: what the model may call. ToolResponse: what it gets back. Tool authors read this file only.

    class CheckAnswer(Tool):
        \"\"\"Check a proposed answer.\"\"\"

        def create(self, ground_truth: str) -> None:
            self.truth, self.best = ground_truth, 0.0

        def execute(self, answer: str) -> str:
            \"\"\"answer: the number you propose\"\"\"
            self.best = max(self.best, float(answer == self.truth))
            return "correct" if answer == self.truth else "incorrect"

        def calc_reward(self) -> float:
            return self.best

One object per request, made without arguments. Every hook may be sync or async; tools/session.py
calls them, each under a deadline. Raise ToolError to tell the model what it did wrong.
"""

from __future__ import annotations

import io
import json
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args, overload

from fsm_rollout.arrays import FLOAT32_MAX
from fsm_rollout.limits import CUT_MARK

TruncateSide = Literal["left", "right", "middle"]


class Tool:
    """Base of all tools. Subclasses define `execute` and whichever other hooks they need.

    The sync hooks of one object never run at the same time as each other; async ones interleave at
    their awaits. Parameters of `execute` before a `*` are the model's; keyword-only ones are hidden
    from it and come from the row's `execute_kwargs`.
    """

    name: ClassVar[str] = ""
    """what the model calls it; default: the class name in snake_case"""
    description: ClassVar[str] = ""
    """what the model reads; default: the docstring of the class"""
    parameters: ClassVar[Mapping[str, Any] | None] = None
    """a JSON Schema to show in place of the one derived from the signature of `execute`"""
    blocking: ClassVar[bool] = True
    """sync hooks run in threads; False: inline, for hooks that return within microseconds"""
    required: ClassVar[bool] = False
    """a failing `create` aborts the request; False: a call of it is answered "unavailable"""
    max_concurrent: ClassVar[int | None] = None
    """`execute` calls that run at the same time, over all requests of an event loop"""
    max_response_tokens: ClassVar[int | None] = None
    """content tokens of one response, beside Limits.max_tool_response_tokens"""
    truncate_side: ClassVar[TruncateSide] = "middle"
    """the side of an oversized response that is dropped"""
    is_closed: ClassVar[bool] = False
    """the model may give what `parameters` names and nothing else, as if the schema said so"""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = re.sub(
                r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__
            ).lower()

    def create(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare for one request, with the row's `create_kwargs`. If it raises, no `release`."""

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Answer one call of the model; see `to_response` for what may be returned."""
        raise NotImplementedError

    def calc_reward(self, *args: Any, **kwargs: Any) -> Any:
        """Called once at the end. A finite number, or None for no reward (which is not 0)."""

    def release(self, *args: Any, **kwargs: Any) -> Any:
        """Free what `create` took. Called exactly once, also when `create` was interrupted."""


HOOKS = ("create", "execute", "calc_reward", "release")


@dataclass(frozen=True, slots=True)
class ToolResponse:
    """What one call gives back. Raises TypeError or ValueError for a field that cannot be data."""

    text: str = ""
    images: tuple[Any, ...] = ()
    reward: float | None = None
    """reward of this turn: finite; None: none"""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """numbers for the batch metrics"""
    stop: bool = False
    """end the request as COMPLETED(tool_stop) once this response is recorded"""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(
                f"ToolResponse.text must be str, got {type(self.text).__name__}; "
                "json.dumps makes a text of it"
            )
        object.__setattr__(self, "images", tuple(self.images))
        object.__setattr__(self, "stop", bool(self.stop))
        if self.reward is not None:
            object.__setattr__(self, "reward", finite(self.reward, what="ToolResponse.reward"))
        checked = {
            str(key): finite(value, what=f"metric {key!r}") for key, value in self.metrics.items()
        }
        object.__setattr__(self, "metrics", checked)


def finite(value: Any, *, what: str) -> float:
    """`value` as a float, True is 1.0. TypeError if it is no number, ValueError if not finite, as
    float32 too: that is what trainers make of it."""
    if not isinstance(value, numbers.Real) and type(value).__name__ != "bool":  # numpy's is no Real
        raise TypeError(f"{what} must be a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, got {number}")
    if abs(number) > FLOAT32_MAX:
        raise ValueError(f"{what} must be finite in float32, got {number}")
    return number


def to_response(value: Any) -> ToolResponse:
    """What `execute` returned as a ToolResponse: None is "", a str is itself, JSON is dumped.

    Raises TypeError for anything else, and what json.dumps raises for what is not JSON. Takes long
    for a huge value, but does not hold the GIL.
    """
    if isinstance(value, ToolResponse):
        return value
    if value is None:
        return ToolResponse()
    if isinstance(value, str):
        return ToolResponse(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)  # a numpy one too
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        value = finite(value, what="a number")
    if isinstance(value, (dict, list, tuple, int, float)):
        text = io.StringIO()
        text.writelines(json_parts(value))
        return ToolResponse(text.getvalue())
    raise TypeError(
        "execute must return str, None, a JSON value (dict, list, number, bool) or ToolResponse, "
        f"got {type(value).__name__}"
    )


def json_parts(value: Any) -> Iterator[str]:
    """The JSON text of a value, bit by bit: json.dumps would hold the GIL to the end of it."""
    return json.JSONEncoder(ensure_ascii=False, allow_nan=False).iterencode(value)


class FunctionTool(Tool):
    """A stateless tool made by `@tool`; its calls run in parallel even if the function is sync."""

    function: ClassVar[Callable[..., Any]]


@overload
def tool(function: Callable[..., Any], /) -> type[FunctionTool]: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str = "",
    parameters: Mapping[str, Any] | None = None,
    blocking: bool = True,
    max_concurrent: int | None = None,
    max_response_tokens: int | None = None,
    truncate_side: TruncateSide = "middle",
) -> Callable[[Callable[..., Any]], type[FunctionTool]]: ...
def tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, **attributes: Any
) -> type[FunctionTool] | Callable[[Callable[..., Any]], type[FunctionTool]]:
    """Turn a function, sync or async, into a stateless Tool class: `@tool` or `@tool(name="x")`.

    The schema comes from the signature and the docstring; the function itself stays at `.function`.
    """
    for option in attributes:
        if option not in Tool.__annotations__:
            raise TypeError(f"@tool has no option {option!r}")

    def wrap(function: Callable[..., Any]) -> type[FunctionTool]:
        shared = staticmethod(function)
        own = {"execute": shared, "function": shared, "name": name or function.__name__}
        return type(
            function.__name__,
            (FunctionTool,),
            {"__module__": function.__module__, "__doc__": function.__doc__, **own, **attributes},
        )

    return wrap if function is None else wrap(function)


def cut_text(text: str, max_chars: int, *, side: TruncateSide) -> str:
    """`text` with its `side` replaced by CUT_MARK so that `max_chars` characters of it stay."""
    if len(text) <= max_chars:
        return text
    head = {"left": 0, "right": max_chars, "middle": (max_chars + 1) // 2}[side]
    tail = max_chars - head
    return text[:head] + CUT_MARK + text[len(text) - tail :]


TRUNCATE_SIDES = get_args(TruncateSide)
