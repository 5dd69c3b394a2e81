"""An HTTP server that looks like SGLang and vLLM, for tests; docs/how-to has a page on it.

server.py ties it together. answers.py and model.py say what is answered, schedule.py when,
sglang.py, vllm.py and completions.py in whose words, faults.py and plan.py what goes wrong.
"""

from fsm_rollout.testing.fake_engine import faults
from fsm_rollout.testing.fake_engine.answers import LogNormal
from fsm_rollout.testing.fake_engine.plan import FaultPlan, Rule, load_faults
from fsm_rollout.testing.fake_engine.router import FakeRouter
from fsm_rollout.testing.fake_engine.schedule import Latency
from fsm_rollout.testing.fake_engine.seen import Seen
from fsm_rollout.testing.fake_engine.server import FakeEngine

__all__ = [
    "FakeEngine",
    "FakeRouter",
    "FaultPlan",
    "Latency",
    "LogNormal",
    "Rule",
    "Seen",
    "faults",
    "load_faults",
]
