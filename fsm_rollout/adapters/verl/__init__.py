"""verl: an agent loop and managers that plug into verl 0.9 by configuration alone.

`FsmAgentLoop` is one YAML entry at `rollout.agent.agent_loop_config_path`. `FsmAgentLoopManager`
(V0) and `FsmAgentLoopManagerTQ` (V1) at `rollout.agent.agent_loop_manager_class` play the same
entry without verl's costs per trajectory; `sampler.py` tells V1's tracker what they played. Names
load lazily: only the managers and the sampler import verl.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsm_rollout.adapters.verl.engine import VerlEngine
    from fsm_rollout.adapters.verl.loop import FsmAgentLoop
    from fsm_rollout.adapters.verl.manager import FsmAgentLoopManager
    from fsm_rollout.adapters.verl.manager_tq import FsmAgentLoopManagerTQ

__all__ = ["FsmAgentLoop", "FsmAgentLoopManager", "FsmAgentLoopManagerTQ", "VerlEngine"]

_MODULES = {
    "FsmAgentLoop": "loop",
    "FsmAgentLoopManager": "manager",
    "FsmAgentLoopManagerTQ": "manager_tq",
    "VerlEngine": "engine",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
