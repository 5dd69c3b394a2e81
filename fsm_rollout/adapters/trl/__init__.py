"""TRL 1.16: rollouts for its GRPOTrainer and its AsyncGRPOTrainer.

from fsm_rollout.adapters.trl import RolloutFunc, reward
GRPOTrainer(..., rollout_func=RolloutFunc(tools=["calculator"]), reward_funcs=reward)
"""

from fsm_rollout.adapters.trl.environment import Environment
from fsm_rollout.adapters.trl.rewards import reward, usable_only
from fsm_rollout.adapters.trl.rollouts import RolloutFunc
from fsm_rollout.adapters.trl.worker import RolloutWorker

__all__ = ["Environment", "RolloutFunc", "RolloutWorker", "reward", "usable_only"]
