"""Events: the bytes of a stream, cut anywhere, put together to server-sent events.

transport.py feeds it. O(new bytes), whatever the chunks are; what is pending is bounded.
"""

from __future__ import annotations

from fsm_rollout.errors import EngineError
from fsm_rollout.limits import StopReason

MAX_EVENT_BYTES = 256 * 1024 * 1024
"""of one event: the last one of a long generation may carry routed experts for each token"""


class Events:
    """Collects `data:` lines; an event ends at a blank line. Other fields and comments are skipped.

    Lines end in `\\n` or `\\r\\n`.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of a line whose end did not come yet
        self._lines: list[bytes] = []  # data of the event whose blank line did not come yet
        self._open, self._held = 0, 0  # bytes in each of them

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of each event that `chunk` completes. EngineError(bad_reply): one is endless."""
        self._parts.append(chunk)
        self._open += len(chunk)
        events: list[bytes] = []
        if b"\n" in chunk:
            *lines, rest = b"".join(self._parts).split(b"\n")
            for line in lines:
                self._take(line.removesuffix(b"\r"), events)
            self._parts, self._open = [rest], len(rest)
        if self._open + self._held > MAX_EVENT_BYTES:
            raise EngineError(
                f"the stream has an event of more than {MAX_EVENT_BYTES} bytes",
                reason=StopReason.BAD_REPLY,
            )
        return events

    def flush(self) -> list[bytes]:
        """At the end of the stream: the event that lacks its blank line, if there is one."""
        return self.feed(b"\n\n")

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(b"data:"):
            self._lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
            self._held += len(line)
        elif not line and self._lines:
            events.append(b"\n".join(self._lines))
            self._lines.clear()
            self._held = 0
