"""Metrics: a finished batch as one flat dict of floats, for whatever tracker the trainer has.

`batch.py` counts requests, or their `facts.py` where they were played in several processes;
`alarm.py` judges how many were aborted, `names.py` translates into names of verl, slime and TRL.
"""

from fsm_rollout.metrics.alarm import Alarm, AlarmError
from fsm_rollout.metrics.batch import metrics_of
from fsm_rollout.metrics.facts import Facts, RowFacts, facts_of
from fsm_rollout.metrics.names import NAMES, named

__all__ = [
    "NAMES",
    "Alarm",
    "AlarmError",
    "Facts",
    "RowFacts",
    "facts_of",
    "metrics_of",
    "named",
]
