"""Where tokens begin in the text of a completion, and the ids of tokens."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from backends.gateway.answer.logprobs import LogprobsWriter, PieceLogprobs
from backends.gateway.request.fields import CHAT, COMPLETION
from bench.harness.replayed_frontend import TOKEN_ID
from tests.backends.gateway.rig import Rig, run


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


def test_token_ids_come_in_vllms_shapes() -> None:
    prompt = list(b"hi")  # the replayed frontend has a token for each byte

    async def check(rig: Rig) -> None:
        whole = (await rig.post(CHAT, max_tokens=2, return_token_ids=True)).json
        assert whole["prompt_token_ids"] == prompt
        assert whole["choices"][0]["token_ids"] == [TOKEN_ID] * 2
        choice = (await rig.post(COMPLETION, max_tokens=2, return_token_ids=True)).json["choices"][
            0
        ]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, [TOKEN_ID] * 2)
        asked: dict[str, Any] = {"max_tokens": 3, "stream": True, "return_token_ids": True}
        further: list[dict[str, Any]] = [{}, {"logprobs": True}]
        for more in (*further, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
            opening, *chunks, _ = (await rig.post(CHAT, **asked, **more)).events
            assert opening["prompt_token_ids"] == prompt
            assert all("prompt_token_ids" not in each for each in chunks)
            choices = [each["choices"][0] for each in chunks]
            ids = [token_id for each in choices for token_id in each.get("token_ids", [])]
            assert ids == [TOKEN_ID] * 3
        first, *chunks, _ = (await rig.post(COMPLETION, **asked)).events
        assert first["choices"][0]["prompt_token_ids"] == prompt
        assert all("prompt_token_ids" not in each["choices"][0] for each in chunks)
        plain = (await rig.post(CHAT, max_tokens=2)).json
        assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]

    run(check)
