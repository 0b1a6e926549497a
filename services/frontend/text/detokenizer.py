"""Tokens to text while they arrive.

The deltas of any token sequence, with the flushed tail, add up to `decode(all of it, skip_special_tokens=True)`,
and each token costs O(1) amortised. `tokenizers.decoders.DecodeStream` gives neither: it raises on byte-fallback
vocabularies, and it decodes an incomplete tail again with every token.

Two families of decoders are told apart, because they treat bytes that are no UTF-8 differently:

- **byte-level** (GPT-2, Llama 3, Qwen, SmolLM2): the text is the lossy UTF-8 decoding of all bytes, one after another;
- **pieces** (SentencePiece with byte fallback, Metaspace, WordPiece): a run of byte tokens is text if the whole run is
  valid and replacement characters otherwise, so a run is held back until it ends.
"""

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")

_PER_TOKEN_DECODERS = frozenset({"ByteFallback", "Metaspace", "Replace", "WordPiece"})
"""Decoders whose text for a token depends on nothing but the token, and on whether it is the first one."""


class UnsupportedDecoder(ValueError):
    """A tokeniser whose text can't be streamed exactly."""


class Detokenizer(Protocol):
    """The text of one output. Not reusable."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete. Special and unknown tokens have none."""

    def flush(self) -> str:
        """The rest, once no token follows: what was held back as incomplete."""


def detokenizer_factory(tokenizer: Tokenizer, shown: frozenset[str] = frozenset()) -> Callable[[], Detokenizer]:
    """How to make detokenisers for a tokeniser, which must not change any more. Special tokens have no text, except
    those in `shown`. Raises `UnsupportedDecoder`."""
    steps = _decoder_steps(tokenizer)
    names = [str(step["type"]) for step in steps]
    silent = _special_ids(tokenizer, shown)
    if names == ["ByteLevel"]:
        token_bytes = _TokenBytes(tokenizer, silent)
        return lambda: ByteLevelDetokenizer(token_bytes)
    _check_pieces(steps)
    pieces = _Pieces(tokenizer, silent, byte_fallback="ByteFallback" in names)
    return lambda: PieceDetokenizer(pieces)


def token_reader(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """The bytes that a token stands for anywhere but at the beginning, special tokens as they are written. Raises
    `UnsupportedDecoder`."""
    steps = _decoder_steps(tokenizer)
    names = [str(step["type"]) for step in steps]
    if names == ["ByteLevel"]:
        return _TokenBytes(tokenizer, frozenset()).__getitem__
    _check_pieces(steps)
    return _Pieces(tokenizer, frozenset(), byte_fallback="ByteFallback" in names).bytes_of


def _decoder_steps(tokenizer: Tokenizer) -> list[Mapping[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())  # the JSON form, as in tokenizer.json
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _check_pieces(steps: Sequence[Mapping[str, Any]]) -> None:
    """Everything must work token by token; after Fuse, only the first space may go."""
    fused = False
    for step in steps:
        if step["type"] == "Fuse":
            fused = True
        elif step["type"] == "Strip":
            if fused and (step["start"] > 1 or step["stop"] > 0):
                raise UnsupportedDecoder(f"decoder step {dict(step)} can't be streamed")
        elif fused or step["type"] not in _PER_TOKEN_DECODERS:
            raise UnsupportedDecoder(f"decoder step {step['type']!r} can't be streamed")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTES = _byte_alphabet()


def _special_ids(tokenizer: Tokenizer, shown: frozenset[str]) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder().items()
    return frozenset(index for index, token in added if token.special and token.content not in shown)


class _TokenBytes:
    """Token id to bytes, filled on demand; shared by all outputs of a tokeniser."""

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = dict.fromkeys(silent, b"")

    def __getitem__(self, token: int) -> bytes:
        known = self._known.get(token)
        return self._look_up(token) if known is None else known

    def _look_up(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token) if token >= 0 else None
        if piece is None:  # padding of the vocabulary; not remembered, so the map stays as large as the vocabulary
            return b""
        in_alphabet = all(char in _BYTES for char in piece)  # if not, it is an added token, written as it reads
        value = bytes(_BYTES[char] for char in piece) if in_alphabet else piece.encode()
        self._known[token] = value
        return value


class ByteLevelDetokenizer:
    """Incremental lossy UTF-8."""

    def __init__(self, token_bytes: _TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int]) -> str:
        return self._utf8.decode(b"".join([self._token_bytes[token] for token in tokens]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Pieces:
    """What a piece detokeniser asks of its tokeniser."""

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int], *, byte_fallback: bool) -> None:
        self._tokenizer = tokenizer
        self._silent = silent
        self._byte_fallback = byte_fallback

    def has_text(self, token: int) -> bool:
        return token >= 0 and token not in self._silent and self._tokenizer.id_to_token(token) is not None

    def is_byte(self, token: int) -> bool:
        return self._byte_fallback and _BYTE_PIECE.fullmatch(self._tokenizer.id_to_token(token) or "") is not None

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def bytes_of(self, token: int) -> bytes:
        if not self.has_text(token):
            return b""
        if self.is_byte(token):
            return bytes([int((self._tokenizer.id_to_token(token) or "")[3:5], 16)])
        # Behind itself, so that it isn't the first token, which may lose its space.
        return self.decode((token, token))[len(self.decode((token,))) :].encode()


class PieceDetokenizer:
    """Decodes behind one token of context, so that only the first token counts as the first one."""

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        ready = 0
        for token in tokens:
            if not self._pieces.has_text(token):
                continue
            self._pending.append(token)
            if not self._pieces.is_byte(token):
                ready = len(self._pending)
        return self._take(ready)

    def flush(self) -> str:
        return self._take(len(self._pending))

    def _take(self, count: int) -> str:
        if count == 0:
            return ""
        taken, self._pending = self._pending[:count], self._pending[count:]
        text = self._pieces.decode(self._context + taken)[len(self._pieces.decode(self._context)) :]
        self._context = taken[-1:]
        return text
