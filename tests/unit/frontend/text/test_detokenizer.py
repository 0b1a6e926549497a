"""Incremental text equals the text of the whole, for any tokens and any cut into chunks."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from meshift.services.frontend.text import detokenizer as module
from meshift.services.frontend.text.detokenizer import Detokenizer, UnsupportedDecoder, detokenizer_factory
from tests.support.examples import examples
from tests.unit.frontend.text.tiny_model import tiny_tokenizer

PIECES = ("▁", "▁▁", "▁hello", "wor", "ld", "▁你", "好", "ö", "�", "é", " x", ".", "##lo", "n't")


def piece_tokenizer(decoder: decoders.Decoder | None) -> Tokenizer:
    """A SentencePiece-like vocabulary: byte tokens and pieces, some of them awkward."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    vocabulary.update({piece: 259 + index for index, piece in enumerate(PIECES)})
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<added▁token>", special=False)])
    return tokenizer


LLAMA = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())

TOKENIZERS: dict[str, Tokenizer] = {
    "byte-level": tiny_tokenizer(),
    "llama": piece_tokenizer(decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)])),
    "gemma": piece_tokenizer(decoders.Sequence(list(LLAMA))),
    "metaspace": piece_tokenizer(decoders.Metaspace()),
    "wordpiece": piece_tokenizer(decoders.WordPiece()),
    "no decoder": piece_tokenizer(None),
}


def token_lists(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids (also some beyond the vocabulary), repeated ids, and real text with random ids between."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    ids = st.integers(min_value=-1, max_value=size + 3)
    few = st.lists(ids, min_size=1, max_size=4).flatmap(lambda some: st.lists(st.sampled_from(some), max_size=20))
    byte_runs = st.binary(max_size=12).map(lambda data: byte_ids(tokenizer, data))
    chars = st.text(max_size=6).map(lambda text: byte_ids(tokenizer, text.encode()))
    parts = st.one_of(st.lists(ids, max_size=8), few, byte_runs, chars)
    return st.lists(parts, max_size=6).map(lambda lists: [token for part in lists for token in part])


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One byte token for each byte."""
    if tokenizer.token_to_id("<0x00>") is not None:
        return [3 + byte for byte in data]
    characters = {byte: char for char, byte in module._BYTES.items()}
    found = [tokenizer.token_to_id(characters[byte]) for byte in data]
    assert None not in found
    return [token for token in found if token is not None]


def reference(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The library's own text of the whole; it takes no negative ids."""
    return tokenizer.decode([token for token in tokens if token >= 0], skip_special_tokens=True)


FACTORIES: dict[str, Callable[[], Detokenizer]] = {
    name: detokenizer_factory(tokenizer) for name, tokenizer in TOKENIZERS.items()
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=examples(80))
@given(data=st.data())
def test_deltas_are_final_and_add_up_to_the_whole(name: str, data: st.DataObject) -> None:
    tokens = data.draw(token_lists(TOKENIZERS[name]))
    size = data.draw(st.integers(1, 5))
    whole = reference(TOKENIZERS[name], tokens)
    detokenizer, text = FACTORIES[name](), ""
    for start in range(0, len(tokens), size):
        text += detokenizer.push(tokens[start : start + size])
        assert whole.startswith(text)
    assert text + detokenizer.flush() == whole


@pytest.mark.parametrize("text", ["hello world", "wörter", "你好", "a😀b", " leading", "<好> ja", "👩‍👩‍👧 e\u0301"])
def test_complete_characters_are_never_held_back(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    tokens = tokenizer.encode(text).ids
    detokenizer = FACTORIES["byte-level"]()
    assert "".join(detokenizer.push((token,)) for token in tokens) == text
    assert detokenizer.flush() == ""


def test_half_a_character_waits_for_the_other_half() -> None:
    tokens = byte_ids(TOKENIZERS["byte-level"], "é😀".encode())
    detokenizer = FACTORIES["byte-level"]()
    assert [detokenizer.push((token,)) for token in tokens] == ["", "é", "", "", "", "😀"]


def test_an_incomplete_tail_is_flushed_as_the_full_decode_does() -> None:
    tokens = byte_ids(TOKENIZERS["byte-level"], "a😀".encode()[:-1])
    detokenizer = FACTORIES["byte-level"]()
    assert detokenizer.push(tokens) == "a"
    assert detokenizer.flush() == "�"


def test_a_run_of_fallback_bytes_is_held_until_it_ends() -> None:
    tokenizer = TOKENIZERS["llama"]
    ending = tokenizer.token_to_id("ld")
    assert ending is not None
    detokenizer = FACTORIES["llama"]()
    assert detokenizer.push(byte_ids(tokenizer, "你".encode())) == ""
    assert detokenizer.push((ending,)) == "你ld"


def test_only_the_first_space_of_a_piece_text_goes() -> None:
    space, hello = (TOKENIZERS["llama"].token_to_id(piece) for piece in ("▁", "▁hello"))
    assert space is not None
    assert hello is not None
    detokenizer = FACTORIES["llama"]()
    assert [detokenizer.push((token,)) for token in (hello, space, hello)] == ["hello", " ", " hello"]


@pytest.mark.parametrize("name", ["llama", "metaspace"])
def test_each_token_is_decoded_at_most_three_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = 0
    original = module._Pieces.decode

    def counting(self: module._Pieces, tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return original(self, tokens)

    monkeypatch.setattr(module._Pieces, "decode", counting)
    count = 3000
    detokenizer = FACTORIES[name]()
    for index in range(count):
        detokenizer.push((3 + 0x80 if index < count // 2 else 261,))
    detokenizer.flush()
    assert decoded <= 3 * count


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    ],
)
def test_decoders_that_change_earlier_text_are_refused(decoder: decoders.Decoder) -> None:
    with pytest.raises(UnsupportedDecoder, match="can't be streamed"):
        detokenizer_factory(piece_tokenizer(decoder))
