"""Detokenizer: ids to text, and which tokens a part of the text lies in.

The vocabulary's way back. Byte-level tokenizers (GPT-2, Llama 3, Qwen, DeepSeek …) have a table of
the bytes of each id, a quarter of the backend's cost; others go through the backend. Both give the
backend's text to the letter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fsm_rollout.arrays import int32

Ids: TypeAlias = npt.NDArray[np.int32]
"""int32 [N], none negative"""

_CHUNK = 8_192
"""ids that are looked up at a time: other threads get the GIL in between"""
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
"""the bytes that byte-level tokenizers spell as the character of the same number"""
_REST = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + n): byte for n, byte in enumerate(_REST)
}


class Detokenizer:
    """Reads the ids of one tokenizer, `size` in number.

    `inner` is an id that may stand before any other.
    """

    def __init__(self, backend: Any, *, size: int, inner: int) -> None:
        from tokenizers.decoders import ByteLevel

        self._backend = backend
        self._inner = inner
        is_byte_level = isinstance(backend.decoder, ByteLevel)
        self._bytes = _Table(self._bytes_of, size, object) if is_byte_level else None
        self._lengths = _Table(self._length_of, size, np.int64)

    def decode(self, ids: Ids) -> str:
        """The text of the ids, control tokens included."""
        if self._bytes is not None:
            return b"".join(self._joined(ids)).decode("utf-8", "replace")
        text: str
        if len(ids) <= _CHUNK:
            text = self._backend.decode(ids.tolist(), skip_special_tokens=False)
        else:  # other than a single one, decoded without the GIL
            [text] = self._backend.decode_batch([ids.tolist()], skip_special_tokens=False)
        return text

    def pieces(self, ids: Ids) -> list[str]:
        """What each id adds to the text ("" until a character is complete); joined, `decode`."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        pieces = [stream.step(self._backend, i) or "" for i in ids.tolist()]
        if pieces:
            pieces[-1] += self.decode(ids)[sum(map(len, pieces)) :]
        return pieces

    def token_spans(
        self, ids: Ids, text: str, spans: Iterable[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The tokens [start, stop) that cover each span of characters of `text` = `decode(ids)`.

        The spans are ascending and disjoint.
        """
        ends = _ends(self._lengths[ids])
        is_in_bytes = self._bytes is not None
        if ends[-1] != len(text.encode() if is_in_bytes else text):
            # bytes that are no character, or a character of several tokens
            ends = _ends(np.array([len(piece) for piece in self.pieces(ids)], np.int64))
        elif is_in_bytes:
            spans = _in_bytes(text, spans)
        found = []
        for start, stop in spans:
            boundary = ends[bisect_right(ends, start) - 1]  # the last one at or before the span
            found.append((bisect_left(ends, boundary), min(bisect_left(ends, stop), len(ids))))
        return found

    def _joined(self, ids: Ids) -> Iterator[bytes]:
        assert self._bytes is not None
        for start in range(0, len(ids), _CHUNK):
            yield b"".join(self._bytes[ids[start : start + _CHUNK]].tolist())

    def _length_of(self, token_id: int) -> int:
        """How long the text of a token is: in bytes where they are known, else in characters."""
        if self._bytes is not None:
            return len(self._bytes_of(token_id))
        # inside a text, where decoders keep a leading space
        first = self._inner
        return len(self.decode(int32([first, token_id]))) - len(self.decode(int32([first])))

    def _bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; b"" for an id out of vocabulary."""
        token: str = self._backend.id_to_token(token_id) or ""
        try:
            return bytes(map(_BYTES.__getitem__, token))
        except KeyError:  # an added token, which is spelt as it is
            return token.encode()


class _Table:
    """What `find` says of each of `size` ids, asked when it first occurs."""

    def __init__(self, find: Callable[[int], Any], size: int, dtype: Any) -> None:
        self._find = lru_cache(size)(find)  # for what the table cannot tell from unknown: 0, b""
        self._known = np.zeros(size + 1, dtype)  # the last one stands for all ids beyond

    def __getitem__(self, ids: Ids) -> npt.NDArray[Any]:
        """[N]: what is known of each id."""
        found = self._known.take(ids, mode="clip")
        if np.count_nonzero(found) == len(ids):
            return found
        return np.array([self._learnt(i) for i in ids.tolist()], self._known.dtype)

    def _learnt(self, token_id: int) -> Any:
        found = self._find(token_id)
        if token_id < len(self._known) - 1:
            self._known[token_id] = found
        return found


def _ends(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[N + 1]: where each of N tokens ends, behind a 0."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.add.accumulate(lengths, out=ends[1:])
    return ends


def _in_bytes(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    at = offset = 0
    for start, stop in spans:
        first = offset + len(text[at:start].encode())
        at, offset = stop, first + len(text[start:stop].encode())
        yield first, offset
