"""Rewards: what a finished request earned, in named parts. None is never 0.

`rewards.py` combines the parts by name, `part.py` is one function and what it may return;
`batch.py` and `worker.py` are two ways to call it. Authors of reward functions need these names.
"""

from fsm_rollout.rewards.part import (
    RewardError,
    RewardFunction,
    RewardPart,
    Score,
    model_turns,
)
from fsm_rollout.rewards.rewards import Rewards

__all__ = ["RewardError", "RewardFunction", "RewardPart", "Rewards", "Score", "model_turns"]
