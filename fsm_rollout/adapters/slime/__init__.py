"""slime and miles, by flags alone: fsm-rollout plays the samples of their rollouts.

    --custom-generate-function-path  fsm_rollout.adapters.slime.generate
    --custom-rm-path                 fsm_rollout.adapters.slime.reward
    --custom-reward-post-process-path fsm_rollout.adapters.slime.post_process_rewards
    --rollout-function-path          fsm_rollout.adapters.slime.generate_rollout
    --custom-rollout-log-function-path fsm_rollout.adapters.slime.log_rollout_data
    --custom-eval-rollout-log-function-path fsm_rollout.adapters.slime.log_eval_rollout_data
    --custom-config-path             a YAML file with a mapping `fsm_rollout`, see config.py

player.py plays, record.py writes what came of it into the trainer's own Sample, step.py is a
whole rollout step, tracker.py tells the tracker. Nothing here imports slime before it calls:
samples are known by their fields.
"""

from fsm_rollout.adapters.slime.player import generate
from fsm_rollout.adapters.slime.rewards import post_process_rewards, reward
from fsm_rollout.adapters.slime.step import generate_rollout
from fsm_rollout.adapters.slime.tracker import log_eval_rollout_data, log_rollout_data

__all__ = [
    "generate",
    "generate_rollout",
    "log_eval_rollout_data",
    "log_rollout_data",
    "post_process_rewards",
    "reward",
]
