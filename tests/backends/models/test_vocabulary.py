"""The tokenizer of a GGUF file splits texts as the published tokenizer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.models.conversion import Conversion
from backends.models.progress import no_progress
from backends.models.vocabulary import read_vocabulary
from backends.text.tokenizer import Tokenizer
from tests.backends.models.gguf_files import SPECIAL, TOKENS, small_model


def pieces(text: str, **changes: Any) -> list[str]:
    metadata = small_model(0).metadata
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    vocabulary, found = read_vocabulary(metadata, len(TOKENS))
    assert vocabulary is not None, found
    return list(vocabulary.tokenizer.encode(text).tokens)


def found(**changes: Any) -> str:
    metadata = small_model(0).metadata
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return "\n".join(read_vocabulary(metadata, len(TOKENS))[1])


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["1234"]),
    ],
)
def test_digits_are_split_as_the_rule_of_the_name_says(pre: str, expected: list[str]) -> None:
    assert pieces("1234", pre=pre, add_bos_token=False) == expected


def test_smollm_keeps_all_spaces_before_a_digit_together() -> None:
    assert pieces("x   12") == ["x", "ĠĠĠ", "1", "2"]
    # Without the split of digits, the last space belongs to the number.
    assert pieces("x   12", pre="gpt-2") == ["x", "ĠĠ", "Ġ", "12"]


def test_only_qwen2_normalises_a_text() -> None:
    decomposed, composed = "e\u0301", "\u00e9"
    assert pieces(decomposed, pre="qwen2") == pieces(composed, pre="qwen2")
    assert pieces(decomposed, pre="smollm") != pieces(composed, pre="smollm")


def test_a_bos_is_added_if_the_metadata_or_else_the_rule_says_so() -> None:
    assert pieces("a") == ["a"]
    assert pieces("a", add_bos_token=True) == [SPECIAL[1], "a"]
    assert pieces("a", pre="llama-bpe") == [SPECIAL[1], "a"]
    assert pieces("a", pre="llama-bpe", add_bos_token=False) == ["a"]


def test_control_and_user_defined_tokens_are_whole_and_unused_ones_are_absent(
    tmp_path: Path,
) -> None:
    conversion = Conversion.open(small_model(0).write(tmp_path / "model.gguf"))
    conversion.write(tmp_path, no_progress)
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("<|im_start|>ab<tool>[PAD0]")
    assert ids[:3] == [1, TOKENS.index("ab"), TOKENS.index("<tool>")]
    assert len(ids) == 3 + len("[PAD0]")
    assert tokenizer.decode(ids) == "ab<tool>[PAD0]"  # <tool> is part of an answer's text
    assert tokenizer.eos_ids == (2, 0)
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat(messages) == "<|im_start|>ab<|im_end|>"


def test_wrong_tokenizer_metadata_is_rejected_by_name() -> None:
    text = found(model="llama", pre="default")
    assert "tokenizer.ggml.model is 'llama', which is not supported; known: gpt2" in text
    assert "tokenizer.ggml.pre is 'default', which is not supported; known: gpt-2, smollm" in text
    assert "tokenizer.ggml.merges is missing" in found(merges=[1, 2])
    assert "tokenizer.ggml.merges does not fit tokenizer.ggml.tokens" in found(merges=["a zz"])
    assert "does not fit tokenizer.ggml.token_type" in found(tokens=[*TOKENS[:-1], "a"])
    assert "does not fit tokenizer.ggml.token_type" in found(token_type=[1])
