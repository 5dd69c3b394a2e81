"""Prompt: the ids of a request as they came, JSON array items. Decoded only where someone looks.

128k ids are 700 kB of text. Counting them, hashing them and finding some of them in the text takes
a fraction of what decoding them would.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec
import numpy as np

_SPACE = b" \t\r\n"
_FOREIGN = b'[{"-.eEn'  # what JSON other than a flat array of non-negative integers has in it


class Prompt:
    """One prompt; `items` is `1,2,3`."""

    __slots__ = ("items", "num_ids")

    def __init__(self, raw: msgspec.Raw) -> None:
        """Of a JSON array. ValueError when it holds anything but token ids, or nothing."""
        text = bytes(raw).strip()
        if any(space in text for space in _SPACE):
            text = text.translate(None, _SPACE)
        items = text[1:-1]
        if text[:1] != b"[" or any(letter in items for letter in _FOREIGN):
            raise ValueError("the prompt must be one array of non-negative token ids")
        if not items:
            raise ValueError("the prompt must not be empty")
        self.items = items
        self.num_ids = int(np.count_nonzero(np.frombuffer(items, np.uint8) == ord(","))) + 1

    @property
    def ids(self) -> list[int]:
        found: list[int] = msgspec.json.decode(b"[%b]" % self.items, type=list[int])
        return found

    def last(self, count: int) -> list[int]:
        """The last `count` ids, or all when there are fewer."""
        return [int(item) for item in self.items[-12 * count :].split(b",")[-count:]]

    def occurrences(self, ids: Sequence[int]) -> tuple[int, int]:
        """How often `ids` stand in it, and how many ids follow the last time."""
        wanted = b",%b," % b",".join(b"%d" % token_id for token_id in ids)
        text = b",%b," % self.items
        end = text.rfind(wanted) + len(wanted)
        if end < len(wanted):
            return 0, self.num_ids
        return text.count(wanted), text.count(b",", end)

    def hash(self, seed: int) -> int:
        """32 bits that depend on every id."""
        return zlib.crc32(self.items, seed & 0xFFFFFFFF)
