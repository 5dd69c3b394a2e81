"""HttpSettings: deadlines and bounds of an engine over HTTP.

Apart from engines/http/, so that a config that names them is read without loading an HTTP client.
"""

from __future__ import annotations

import msgspec

from fsm_rollout.errors import ConfigError


class HttpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Deadlines and bounds of an engine's HTTP. ConfigError when a value is out of range."""

    connect_timeout_s: float = 10.0
    """name lookup and handshake of one connection"""
    timeout_s: float = 600.0
    """one try, from its start to the last byte of its reply"""
    first_byte_timeout_s: float = 60.0
    """of a stream: until its head; a reply that is none has it when it is complete"""
    idle_timeout_s: float = 60.0
    """between two chunks of a stream; from head to end of a reply that is none"""
    abort_timeout_s: float = 10.0
    """one abort, and how long an aborted try may take to end; so long `close` waits for them"""
    engine_wait_s: float = 60.0
    """without any server that answers; then the request ends with no_engine"""
    max_tries: int = 5
    """of one `generate`, the first included; those that found no server don't count"""
    max_connecting: int = 512
    """connections to one server that are set up at the same time"""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value, is_count = getattr(self, name), name.startswith("max_")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < float("inf"):
                raise ConfigError(f"HttpSettings.{name} must be a number > 0, got {value!r}")
            if is_count and not isinstance(value, int):
                raise ConfigError(f"HttpSettings.{name} must be a whole number, got {value!r}")
