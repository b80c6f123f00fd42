"""Streamed text: whole characters, never taken back, the same for every way to cut the stream."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from backends.text.text_stream import OutputDelta, TextStream, merge, new_text
from backends.text.token_bytes import CONTEXT_TOKENS
from backends.text.tokenizer import Tokenizer
from tests.backends.small_tokenizers import DEMO, EOS, KINDS, TEXTS, tokenizer_of

TOKENIZERS = {kind: tokenizer_of(kind) for kind in KINDS}
BYTE_KINDS = ("byte_level", "byte_fallback")
STOP_WORDS = ("STOP", "OP!", "é", "日本", "\n\n", "the lazy cat", "😀👍", "hello world", " ", "▁")
ROUNDS = 150


def chunks(token_ids: Sequence[int], rng: random.Random) -> Iterator[list[int]]:
    """The tokens in order, in pieces of random size, some of them empty."""
    start = 0
    while start < len(token_ids):
        end = start + rng.choice((0, 1, 1, 1, 2, 3, 7, 30))
        yield list(token_ids[start:end])
        start = end


def some_tokens(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Text, or random tokens (nearly always invalid UTF-8) with special ones and strangers."""
    if rng.random() < 0.4:
        text = "".join(rng.choices(TEXTS, k=2))
        start = rng.randrange(len(text))
        return tokenizer.encode(text[start : start + rng.randint(1, 80)], add_special=False)
    ids = rng.choices(range(tokenizer.vocabulary_tokens), k=rng.randint(1, 60))
    strangers = [-1, 10**6, *tokenizer.eos_ids]
    return [rng.choice(strangers) if rng.random() < 0.1 else token_id for token_id in ids]


def streamed(stream: TextStream, pieces: Iterator[list[int]]) -> list[OutputDelta]:
    deltas = []
    for piece in pieces:
        deltas.append(stream.push(piece))
        stream.check()
        if stream.is_stopped:
            return deltas
    return [*deltas, stream.finish()]


def recomputed(tokenizer: Tokenizer, deltas: Sequence[OutputDelta]) -> str:
    """The text as the postprocessing model computes it, which knows one delta at a time."""
    return "".join(
        new_text(tokenizer, e.context_ids, e.token_ids, e is deltas[-1], e.cut_bytes)
        for e in deltas
    )


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_of_any_chunking_add_up_to_the_whole(kind: str, seed: int) -> None:
    tokenizer, rng = TOKENIZERS[kind], random.Random(seed)
    for _ in range(ROUNDS):
        prompt, output = some_tokens(tokenizer, rng), some_tokens(tokenizer, rng)
        whole = new_text(tokenizer, prompt, output, True)
        deltas = streamed(TextStream(tokenizer, prompt), chunks(output, rng))
        assert "".join(e.text for e in deltas) == whole
        assert recomputed(tokenizer, deltas) == whole
        assert [i for e in deltas for i in e.token_ids] == output
        assert all(len(e.context_ids) <= CONTEXT_TOKENS for e in deltas)
        assert merge(deltas).text == whole


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_is_the_decoded_text(kind: str, seed: int) -> None:
    tokenizer, rng = TOKENIZERS[kind], random.Random(seed)
    for _ in range(ROUNDS):
        text = "".join(rng.choices("".join(TEXTS), k=rng.randint(2, 60)))
        token_ids = tokenizer.encode(text, add_special=False)
        border = rng.randrange(len(token_ids) + 1)
        deltas = streamed(
            TextStream(tokenizer, token_ids[:border]), chunks(token_ids[border:], rng)
        )
        before = new_text(tokenizer, [], token_ids[:border], False)
        assert before + "".join(e.text for e in deltas) == tokenizer.decode(token_ids)


def test_byte_level_garbage_decodes_as_the_library_does(seed: int) -> None:
    tokenizer, rng = TOKENIZERS["byte_level"], random.Random(seed)
    for _ in range(10 * ROUNDS):
        token_ids = some_tokens(tokenizer, rng)
        assert new_text(tokenizer, [], token_ids, True) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_no_delta_ends_inside_a_character(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode("".join(TEXTS), add_special=False)
    stream = TextStream(tokenizer)
    texts = [stream.push([token_id]).text for token_id in token_ids]
    assert not any("\ufffd" in text for text in texts)
    assert stream.finish().text == ""


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_an_unfinished_character_waits_and_ends_as_a_replacement(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    first, second, third = byte_ids(tokenizer, "€".encode())
    eos = tokenizer.eos_ids[0]
    stream = TextStream(tokenizer)
    assert [stream.push([token_id]).text for token_id in (first, second)] == ["", ""]
    assert stream.push([eos]).text == ""
    assert stream.push([third]).text == "€"
    assert stream.push([first]).text == ""
    assert stream.finish().text == "\ufffd"
    assert new_text(tokenizer, [first, second], [third], False) == "€"
    assert new_text(tokenizer, [first], [first], False) == "\ufffd"
    assert new_text(tokenizer, [first], [], True) == "\ufffd"


def test_a_bad_byte_does_not_change_characters_that_were_streamed() -> None:
    """The library would turn the whole run of byte tokens into U+FFFD."""
    tokenizer = TOKENIZERS["byte_fallback"]
    token_ids = byte_ids(tokenizer, "日".encode() + b"\xff" + "本".encode())
    stream = TextStream(tokenizer)
    texts = [stream.push([token_id]).text for token_id in token_ids]
    assert texts == ["", "", "日", "\ufffd", "", "", "本"]


def byte_ids(tokenizer: Tokenizer, wanted: bytes) -> list[int]:
    """A token for each byte."""
    single = {
        tokenizer.token_bytes.of((), token_id): token_id
        for token_id in range(tokenizer.vocabulary_tokens)
        if tokenizer.token_bytes.has_text(token_id)
    }
    return [single[bytes([value])] for value in wanted]


def expected_stop(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    output: Sequence[int],
    words: Sequence[str],
    min_tokens: int,
) -> tuple[int, int] | None:
    """(begin, tokens) of the stop word that is complete first, by looking at everything.

    `begin` in bytes of the output; `tokens` before which it was not complete.
    """
    stream = TextStream(tokenizer, prompt)
    pieces = []
    context = [i for i in prompt if tokenizer.token_bytes.has_text(i)][-CONTEXT_TOKENS:]
    for token_id in output:
        has_text = tokenizer.token_bytes.has_text(token_id)
        pieces.append(tokenizer.token_bytes.of(tuple(context), token_id) if has_text else b"")
        context = [*context, token_id][-CONTEXT_TOKENS:] if has_text else context
    stream.check()
    whole, start = b"".join(pieces), sum(map(len, pieces[:min_tokens]))
    for end in range(start + 1, len(whole) + 1):
        ending = [w.encode() for w in words if whole[:end].endswith(w.encode())]
        if ending:
            lengths = [len(b"".join(pieces[:count])) for count in range(len(pieces) + 1)]
            begin = end - max(map(len, ending))
            return begin, next(count for count, size in enumerate(lengths) if size >= end)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_word_is_cut_off_wherever_it_lies_in_the_tokens(kind: str, seed: int) -> None:
    tokenizer, rng = TOKENIZERS[kind], random.Random(seed)
    stops = 0
    for _ in range(3 * ROUNDS):
        prompt, output = some_tokens(tokenizer, rng), some_tokens(tokenizer, rng)
        words = rng.sample(STOP_WORDS, k=rng.randint(1, 4))
        min_tokens = rng.choice((0, 0, 3))
        stream = TextStream(tokenizer, prompt, words, min_tokens=min_tokens)
        deltas = streamed(stream, chunks(output, rng))
        text = "".join(e.text for e in deltas)
        expected = expected_stop(tokenizer, prompt, output, words, min_tokens)
        assert stream.is_stopped == (expected is not None)
        assert recomputed(tokenizer, deltas) == text
        released = [i for e in deltas for i in e.token_ids]
        assert released == output[: len(released)]
        assert stream.is_stopped or len(released) == len(output)
        if expected is None:
            assert text == new_text(tokenizer, prompt, output, True)
            continue
        stops += 1
        begin, tokens = expected
        whole = TextStream(tokenizer, prompt).push(output[:tokens], is_last=True)
        assert whole.text.startswith(text)
        assert deltas[-1].is_stopped and not any(e.is_stopped for e in deltas[:-1])
        assert len(released) < tokens or begin > 0
        assert merge(deltas).cut_bytes == len(text.encode())
        assert merge(deltas).is_stopped
    assert stops > ROUNDS / 10, "the test would prove little"


def test_a_stop_word_over_token_borders_by_example() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = byte_ids(tokenizer, b"go STOP! on")
    stream = TextStream(tokenizer, [], ["STOP!", "STEP"])
    texts = [stream.push([token_id]).text for token_id in token_ids[:7]]
    assert texts == ["g", "o", " ", "", "", "", ""]
    assert len(stream._held) == 4
    last = stream.push(token_ids[7:])
    assert last == OutputDelta((), "", 0, True, tuple(token_ids[:3]))
    assert stream.push([token_ids[0]]) == OutputDelta((), "", 0, True, tuple(token_ids[:3]))


@pytest.mark.parametrize(
    ("min_tokens", "texts"),
    [
        (0, ["g", "o", " ", "", "", "", ""]),
        (4, ["g", "o", " ", "", "", "", ""]),  # it begins before the border and ends after it
        (7, ["g", "o", " ", "", "", "", ""]),
        (8, ["g", "o", " ", "", "", "", "", "", "STOP! "]),  # it ends before the border
    ],
)
def test_a_stop_word_that_is_complete_after_min_tokens_stops_wherever_it_begins(
    min_tokens: int, texts: list[str]
) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = byte_ids(tokenizer, b"go STOP! on")
    stream = TextStream(tokenizer, [], ["STOP!"], min_tokens=min_tokens)
    assert [stream.push([token_id]).text for token_id in token_ids[: len(texts)]] == texts
    last = stream.push(token_ids[len(texts) :], is_last=True)
    assert (last.is_stopped, last.text) == ((True, "") if min_tokens < 8 else (False, "on"))


def test_text_that_looked_like_a_stop_word_comes_with_its_tokens() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = byte_ids(tokenizer, b"STSTEM")
    stream = TextStream(tokenizer, [], ["STOP"])
    got = [(e.text, len(e.token_ids)) for e in (stream.push([i]) for i in token_ids)]
    assert got == [("", 0), ("", 0), ("ST", 2), ("", 0), ("STE", 3), ("M", 1)]
    stream = TextStream(tokenizer, [], ["STOP"])
    assert stream.push(token_ids[:2]).text == ""
    assert stream.finish() == OutputDelta(tuple(token_ids[:2]), "ST")


def test_a_stop_word_that_begins_inside_a_token_cuts_that_token() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    hello, world = tokenizer.encode("hello world")
    stream = TextStream(tokenizer, [hello], ["rld"])
    last = stream.push([world])
    assert last == OutputDelta((world,), " wo", 3, True, (hello,))
    assert new_text(tokenizer, last.context_ids, last.token_ids, True, last.cut_bytes) == " wo"


def test_a_half_character_that_may_begin_a_stop_word_is_held_back() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    first, second = byte_ids(tokenizer, "é".encode())
    assert TextStream(tokenizer, [], ["é"]).push([first]).token_ids == ()
    assert TextStream(tokenizer, [], ["日"]).push([first]).token_ids == (first,)
    stopped = TextStream(tokenizer, [], ["é"]).push([first, second])
    assert (stopped.token_ids, stopped.text, stopped.is_stopped) == ((), "", True)


def test_of_stop_words_the_first_complete_one_counts_and_then_the_longest() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    abcd = byte_ids(tokenizer, b"abcd")
    for words, expected in [
        (["bcd", "c"], "ab"),
        (["abc", "bc", "c"], ""),
        (["bcx", "cd"], "ab"),
        (["abcdx", "bc"], "a"),
    ]:
        assert TextStream(tokenizer, [], words).push(abcd).text == expected, words


def test_end_tokens_of_the_request_have_no_text_even_if_they_are_words() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    a, end = byte_ids(tokenizer, b"a!")
    last = TextStream(tokenizer, [], (), end_ids=[end]).push([a, end], is_last=True)
    assert last == OutputDelta((a, end), "a", 1)
    assert new_text(tokenizer, [], [a, end], True, last.cut_bytes) == "a"
    eos = tokenizer.eos_ids[0]
    last = TextStream(tokenizer, [], (), end_ids=[eos]).push([a, eos], is_last=True)
    assert last == OutputDelta((a, eos), "a")


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_moves_goes_on_where_its_client_is(kind: str, seed: int) -> None:
    """The second worker knows the prompt and the tokens that were sent, nothing else."""
    tokenizer, rng = TOKENIZERS[kind], random.Random(seed)
    for _ in range(ROUNDS):
        prompt, output = some_tokens(tokenizer, rng), some_tokens(tokenizer, rng)
        words, min_tokens = rng.sample(STOP_WORDS, k=2), rng.choice((0, 4))
        whole = merge([TextStream(tokenizer, prompt, words, (), min_tokens).push(output, True)])
        first = TextStream(tokenizer, prompt, words, (), min_tokens)
        sent = first.push(output[: rng.randrange(len(output) + 1)])
        if sent.is_stopped:
            continue
        count = len(sent.token_ids)
        second = TextStream(
            tokenizer, [*prompt, *sent.token_ids], words, (), max(min_tokens - count, 0)
        )
        rest = second.push(output[count:], is_last=True)
        assert sent.text + rest.text == whole.text
        assert merge([sent, rest]).token_ids == whole.token_ids


def test_each_token_is_looked_at_once_and_little_is_held(seed: int) -> None:
    """So a long answer costs per token what a short one does."""
    tokenizer, rng = tokenizer_of("byte_fallback"), random.Random(seed)
    calls = 0
    of = tokenizer.token_bytes.of

    def counted(context_ids: Sequence[int], token_id: int) -> bytes:
        nonlocal calls
        calls += 1
        return of(context_ids, token_id)

    tokenizer.token_bytes.of = counted  # type: ignore[method-assign]
    words = [f"{'ab' * 30}{number}" for number in range(32)]
    stream = TextStream(tokenizer, [], words)
    a, the = (tokenizer.encode(text)[-1] for text in ("a", "the"))
    for _ in range(5_000):
        stream.push([rng.choice((a, the))])
        assert len(stream._held) <= 62
        stream.check()
    assert calls == 5_000


def test_special_tokens_are_released_in_place_and_are_no_context() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    eos = tokenizer.encode(EOS)[0]
    a = byte_ids(tokenizer, b"a")[0]
    stream = TextStream(tokenizer, [a, *[eos] * 40])
    assert stream.push([eos, eos]) == OutputDelta((eos, eos), "", context_ids=(a,))
    assert stream.push([a]) == OutputDelta((a,), "a", context_ids=(a,))


def test_special_tokens_have_text_on_request_but_not_the_end_token() -> None:
    tokenizer = Tokenizer.load(DEMO)
    [end_id] = tokenizer.eos_ids
    special = [
        token_id
        for token_id in range(tokenizer.vocabulary_tokens)
        if not tokenizer.token_bytes.has_text(token_id) and token_id != end_id
    ]
    assert special, "the demo's tokenizer has further special tokens"
    words = tokenizer.encode("hello there", add_special=False)
    ids = [*words, special[0], *words, end_id]
    name = tokenizer.decode([special[0]], skip_special=False)
    for shows_special, between in ((False, ""), (True, name)):
        stream = TextStream(tokenizer, (), (), (end_id,), 0, shows_special)
        text = "".join(stream.push([token_id]).text for token_id in ids) + stream.finish().text
        assert text == f"hello there{between}hello there"
