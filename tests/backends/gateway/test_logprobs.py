"""Where tokens begin in the text of a completion."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from backends.gateway.fields import COMPLETION
from backends.gateway.logprobs import LogprobsWriter, PieceLogprobs


class Pieces:
    """Each token is one of these pieces of bytes, by its number."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def of(self, context_ids: list[int], token_id: int) -> bytes:
        return self._pieces[token_id]


def offsets(pieces: list[bytes]) -> list[int]:
    writer = LogprobsWriter(COMPLETION, Pieces(pieces))
    found: list[int] = []
    for token_id in range(len(pieces)):
        piece = PieceLogprobs([token_id], [0.0], [[]], [[]])
        found += writer.add(piece)["text_offset"]
    return found


def test_each_part_of_a_character_has_the_offset_where_the_character_begins() -> None:
    sun = "日".encode()
    assert offsets([b"a", sun[:1], sun[1:2], sun[2:], b"b"]) == [0, 1, 1, 1, 2]
    assert offsets([b"a" + sun[:2], sun[2:] + b"b", b"c"]) == [0, 1, 3]
    assert offsets([sun[:2], b"b", b"c"]) == [0, 1, 2], "bytes that become no character are one"
    assert offsets([sun[:1], b"", sun[1:]]) == [0, 0, 0], "a token without text"
    assert offsets([b"\xff", b"b"]) == [0, 1]


@given(st.text(max_size=20), st.data())
def test_offsets_are_those_of_the_characters_however_a_text_is_cut(
    text: str, data: st.DataObject
) -> None:
    raw = text.encode()
    cuts = data.draw(st.sets(st.integers(0, len(raw)), max_size=8))
    borders = sorted(cuts | {0, len(raw)})
    pieces = [raw[a:b] for a, b in itertools.pairwise(borders)]
    begins = [len(raw[:at].decode("utf-8", "ignore")) for at in borders[:-1]]
    assert offsets(pieces) == begins


@given(st.lists(st.binary(max_size=4), max_size=8))
def test_offsets_of_any_bytes_stay_within_the_text_and_in_order(pieces: list[bytes]) -> None:
    found = offsets(pieces)
    assert found == sorted(found)
    assert all(0 <= offset <= len(b"".join(pieces).decode("utf-8", "replace")) for offset in found)
