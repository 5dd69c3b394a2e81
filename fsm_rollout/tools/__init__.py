"""What the model can call, and what it gets back. Authors need base.py only; names load lazily."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsm_rollout.tools.base import Tool, ToolResponse, tool
    from fsm_rollout.tools.registry import Toolset
    from fsm_rollout.tools.result import CallResult
    from fsm_rollout.tools.session import ToolSession

__all__ = ["CallResult", "Tool", "ToolResponse", "ToolSession", "Toolset", "tool"]

_MODULES = {
    "CallResult": "result",
    "Tool": "base",
    "ToolResponse": "base",
    "ToolSession": "session",
    "Toolset": "registry",
    "tool": "base",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
