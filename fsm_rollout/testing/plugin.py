"""The pytest plug-in of fsm-rollout: fixtures for people who write tools.

Loaded by pytest itself (entry point `pytest11`), so it imports nothing until a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def tool_contract() -> Callable[..., None]:
    """`fsm_rollout.testing.tool_contract.check_tool_contract`: property-test a tool in one line."""
    from fsm_rollout.testing.tool_contract import check_tool_contract

    return check_tool_contract
