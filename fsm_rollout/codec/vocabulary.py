"""Vocabulary: text to ids and back for one tokenizer, and what in it is a control token.

The codec's lower half. What always holds: a control token comes out of `encode` only where template
text spells it; `encode_text` and `encode_after` read any text as plain text. To that end plain text
has a tokenizer of its own: the same model, normaliser and pre-tokeniser, no added tokens.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fsm_rollout.errors import ConfigError
from fsm_rollout.limits import CUT_MARK

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

Side: TypeAlias = Literal["left", "right", "middle"]

LONG = 2_048
"""characters from which on a text is better encoded in a thread"""
_CHUNK = 16_384
"""characters per encoding of a long text: making its ids and freeing it hold the GIL"""
_CONTEXT = 64
"""characters on each side of a cut that must encode alike together and apart"""
_CUT = re.compile(r"(?<=\w)(?=\W)|(?<=[^\W\d])(?=\d)|(?<=\n)(?=\S)")  # as pre-tokenisers cut
_TRIES = 8
"""places at which a cut is tried before the chunk grows"""
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, as broken JSON holds
_GUESS = 4
"""characters per token; a window that turns out too small is doubled"""
_MOST_IDS = 33
"""of one character: bytes of the longest compatibility decomposition (U+FDFA)"""


class Vocabulary:
    """What the ids of a tokenizer mean. Raises ConfigError for a tokenizer that can't be used."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: int | Iterable[int] | None = None,
    ) -> None:
        from tokenizers import AddedToken, Tokenizer

        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"{type(tokenizer).__name__} is a slow tokenizer; the codec needs a fast one "
                "(tokenizer.json): load it with AutoTokenizer.from_pretrained(..., use_fast=True)"
            )
        backend: Any = tokenizer.backend_tokenizer
        self._backend = backend
        self._plain = Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(backend, part)) is not None:
                setattr(self._plain, part, value)
        # Two strings that no text holds, since nobody knows them. Text never starts a sequence: the
        # anchor in front of it says so to tokenizers that put a space before a first word. The mark
        # breaks what only looks like a control token; letters, so that no template changes it.
        self._anchor = f"\ue000{secrets.token_hex(8)}\ue000"
        self._mark = f"Zq{secrets.token_hex(8)}Qz"
        self._plain.add_special_tokens([AddedToken(self._anchor, normalized=False)])

        self.size = len(tokenizer)
        """ids >= size are out of vocabulary, also where the model's embedding has padding rows"""
        added = tokenizer.added_tokens_decoder
        self.control = {
            token.content: i
            for i, token in added.items()
            if self._is_control(token.content, i, special=token.special)
        }
        """the spelling of each control token, special or added, and its id"""
        self.control_ids = frozenset(self.control.values())
        eos: Any = tokenizer.eos_token_id
        self.stop_ids = self._checked_stop_ids(stop_token_ids, eos)
        self._length = cache(self._characters_of)
        self._spellings = sorted(self.control, key=len, reverse=True)
        self._beginnings = {token[:n] for token in self.control for n in range(1, len(token))}
        self._eats_left = {t.content for t in added.values() if t.lstrip}
        self._eats_right = {t.content for t in added.values() if t.rstrip}

    def _is_control(self, token: str, token_id: int, *, special: bool) -> bool:
        if token.isspace():
            return False
        reached = token_id in self.encode_text(token)
        if reached and special:
            raise ConfigError(
                f"the tokenizer's model makes the control token {token!r} out of plain text, so "
                "text from tools could forge turns; use another tokenizer"
            )
        return not reached  # else it is a word that the model knows anyway

    def _checked_stop_ids(
        self, given: int | Iterable[int] | None, eos: int | None
    ) -> frozenset[int]:
        stops = frozenset([given] if isinstance(given, int) else given or ())
        if eos is not None:
            stops |= {eos}
        if not stops:
            raise ConfigError(
                "the tokenizer has no eos_token_id and no stop_token_ids are given: "
                "pass the ids of generation_config.eos_token_id"
            )
        if wrong := sorted(i for i in stops if not 0 <= i < self.size):
            raise ConfigError(f"stop_token_ids {wrong} lie outside the vocabulary [0, {self.size})")
        return stops

    # -- text to ids -------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The ids of a render: control tokens where it spells them, unless `guard` broke them."""
        ids: list[int] = []
        before = ""
        parts = [*self.split(text), ""]
        for text, control in zip(parts[::2], parts[1::2], strict=True):
            plain = text.replace(self._mark, "")
            ids += self.encode_after(
                before, plain.rstrip() if control in self._eats_left else plain
            )
            if control:
                ids.append(self.control[control])
            before = control
        return ids

    def encode_text(self, text: str) -> list[int]:
        """The ids of text that nobody vouches for: never a control token."""
        if not text:
            return []
        if len(text) <= LONG:
            ids: list[int] = self._plain.encode(self._anchored(text), add_special_tokens=False).ids
            return ids[1:]
        ids = []
        for chunk in self._chunks(text):
            batch = [self._anchored(chunk)]  # other than a single text, encoded without the GIL
            ids += self._plain.encode_batch_fast(batch, add_special_tokens=False)[0].ids[1:]
        return ids

    def encode_after(self, control: str, text: str) -> list[int]:
        """`encode_text` for text that stands right behind a control token."""
        return self.encode_text(text.lstrip() if control in self._eats_right else text)

    def split(self, text: str) -> list[str]:
        """Text, control token, text, ..., text."""
        present = [re.escape(token) for token in self._spellings if token in text]
        return re.split(f"({'|'.join(present)})", text) if present else [text]

    def guard(self, text: str) -> str:
        """Text for a render: what it spells or begins of control tokens stays text in `encode`."""
        for token in self._spellings:
            if token in text:
                text = text.replace(token, token[0] + self._mark + token[1:])
        longest = len(self._spellings[0]) if self._spellings else 0
        begins = any(text[-n:] in self._beginnings for n in range(1, longest))
        return text + self._mark if begins else text

    def _anchored(self, text: str) -> str:
        return self._anchor + _SURROGATE.sub("\ufffd", text)

    def _chunks(self, text: str) -> Iterator[str]:
        start = 0
        for position in range(_CHUNK, len(text), _CHUNK):
            cuts = islice(_CUT.finditer(text, position, position + _CHUNK), _TRIES)
            if at := next((cut.start() for cut in cuts if self._parts(text, cut.start())), 0):
                yield text[start:at]
                start = at
        yield text[start:]

    def _parts(self, text: str, at: int) -> bool:
        left, right = text[at - _CONTEXT : at], text[at : at + _CONTEXT]
        return self.encode_text(left + right) == self.encode_text(left) + self.encode_text(right)

    # -- ids to text -------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, control tokens included; for reading, never to be encoded again."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each id adds to the text ("" until a character is complete); joined, `decode`."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        pieces = [stream.step(self._backend, i) or "" for i in ids]
        if pieces:
            pieces[-1] += self.decode(ids)[sum(map(len, pieces)) :]
        return pieces

    def token_spans(
        self, ids: Sequence[int], text: str, spans: Iterable[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The tokens [start, stop) that cover each span of characters of `text` = `decode(ids)`."""
        ends = list(accumulate(map(self._length, ids), initial=0))  # [T+1] characters
        if ends[-1] != len(text):  # a character lies in several tokens
            ends = list(accumulate(map(len, self.pieces(ids)), initial=0))
        found = []
        for start, stop in spans:
            boundary = ends[bisect_right(ends, start) - 1]  # the last one at or before the span
            found.append((bisect_left(ends, boundary), min(bisect_left(ends, stop), len(ids))))
        return found

    def _characters_of(self, token_id: int) -> int:
        """How long the text of a token is; inside a text, where decoders keep a leading space."""
        before = [min(self.stop_ids)]
        return len(self.decode([*before, token_id])) - len(self.decode(before))

    # -- text that fits ----------------------------------------------------------------------------

    def fit(self, text: str, max_tokens: int, *, side: Side) -> str:
        """`text` cut between characters to at most `max_tokens` ids; `side` is what is dropped.

        A cut shows as `CUT_MARK` where that leaves room for text. Costs what is kept, not what is
        given.
        """
        if len(text) * _MOST_IDS <= max_tokens or self._end(text, max_tokens, tail=False) == text:
            return text
        marker = CUT_MARK if len(self.encode_text(CUT_MARK)) < max_tokens else ""
        room = max_tokens - len(self.encode_text(marker))
        while room > 0:
            head = {"left": 0, "right": room, "middle": (room + 1) // 2}[side]
            start = self._end(text, head, tail=False)
            cut = start + marker + self._end(text[len(start) :], room - head, tail=True)
            excess = len(self.encode_text(cut)) - max_tokens
            if excess <= 0 and (cut or side != "middle"):
                return cut
            room -= max(excess, 1)
        # two halves of a small cap may hold no whole character where one of them does
        return self.fit(text, max_tokens, side="right") if side == "middle" else ""

    def _end(self, text: str, count: int, *, tail: bool) -> str:
        """The start of the text, or its tail, as far as `count` ids go."""
        size = _GUESS * count
        while count > 0:
            window = text[-size:] if tail else text[:size]
            encoding = self._encoding(window)
            number = len(encoding) - 1  # the anchor is one
            if number > count:
                first, last = self._characters(encoding, number - count - 1 if tail else count)
                return window[last:] if tail else window[:first]
            if size >= len(text):
                return text
            size *= 2
        return ""

    def _encoding(self, text: str) -> Encoding:
        return self._plain.encode_batch([self._anchored(text)], add_special_tokens=False)[0]

    def _characters(self, encoding: Encoding, number: int) -> tuple[int, int]:
        """Which characters of the text its token of that number, from 0, stands for."""
        start, stop = encoding.token_to_chars(number + 1) or (0, 0)
        return start - len(self._anchor), stop - len(self._anchor)
