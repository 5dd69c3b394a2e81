"""Agent rollouts for RL as finite-state machines.

The public names, each loaded from its module on first use: importing the package imports nothing
else. Inside the package, import from the modules, never from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsm_rollout.codec import Codec
    from fsm_rollout.columns import Column, Columns
    from fsm_rollout.engines.base import Engine, Generation, SamplingParams
    from fsm_rollout.engines.scripted import ScriptedEngine
    from fsm_rollout.engines.sglang import SGLangEngine
    from fsm_rollout.engines.transformers import TransformersEngine
    from fsm_rollout.engines.vllm import VLLMEngine
    from fsm_rollout.errors import (
        ConfigError,
        EngineError,
        GuardRefused,
        HandOverError,
        IllegalEvent,
        InvariantError,
        RolloutError,
        TemplateError,
        ToolError,
    )
    from fsm_rollout.limits import Limits, Status, StopReason
    from fsm_rollout.request import Group, Request
    from fsm_rollout.rewards import RewardPart, Rewards
    from fsm_rollout.rollout import Rollout, run
    from fsm_rollout.sample import Sample
    from fsm_rollout.states.machine import Machine
    from fsm_rollout.states.table import Event
    from fsm_rollout.tools.base import Tool, ToolResponse, tool
    from fsm_rollout.tools.registry import Toolset
    from fsm_rollout.turn import ToolCall, Turn

    __version__: str

__all__ = [
    "Codec",
    "Column",
    "Columns",
    "ConfigError",
    "Engine",
    "EngineError",
    "Event",
    "Generation",
    "Group",
    "GuardRefused",
    "HandOverError",
    "IllegalEvent",
    "InvariantError",
    "Limits",
    "Machine",
    "Request",
    "RewardPart",
    "Rewards",
    "Rollout",
    "RolloutError",
    "SGLangEngine",
    "Sample",
    "SamplingParams",
    "ScriptedEngine",
    "Status",
    "StopReason",
    "TemplateError",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolResponse",
    "Toolset",
    "TransformersEngine",
    "Turn",
    "VLLMEngine",
    "__version__",
    "run",
    "tool",
]

_NAMES = {
    "codec": ("Codec",),
    "columns": ("Column", "Columns"),
    "engines.base": ("Engine", "Generation", "SamplingParams"),
    "engines.scripted": ("ScriptedEngine",),
    "engines.sglang": ("SGLangEngine",),
    "engines.transformers": ("TransformersEngine",),
    "engines.vllm": ("VLLMEngine",),
    "errors": (
        "ConfigError",
        "EngineError",
        "GuardRefused",
        "HandOverError",
        "IllegalEvent",
        "InvariantError",
        "RolloutError",
        "TemplateError",
        "ToolError",
    ),
    "limits": ("Limits", "Status", "StopReason"),
    "request": ("Group", "Request"),
    "rewards": ("RewardPart", "Rewards"),
    "rollout": ("Rollout", "run"),
    "sample": ("Sample",),
    "states.machine": ("Machine",),
    "states.table": ("Event",),
    "tools.base": ("Tool", "ToolResponse", "tool"),
    "tools.registry": ("Toolset",),
    "turn": ("ToolCall", "Turn"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # a checker would take it for "any name exists"

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            value: object = version("fsm-rollout")
        elif name in _MODULE_OF:
            value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
