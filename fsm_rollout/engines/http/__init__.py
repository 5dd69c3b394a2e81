"""Engines over HTTP. engine.py ties it together: a Wire says what, all else says where and when.

call.py tries and tries again, servers.py and endpoints.py know whom to try, transport.py moves the
bytes. The wires of real servers are engines/sglang.py and engines/vllm.py.
"""

from fsm_rollout.engines.http.engine import HttpEngine
from fsm_rollout.engines.settings import HttpSettings

__all__ = ["HttpEngine", "HttpSettings"]
