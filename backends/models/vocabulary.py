"""The tokenizer and its chat template, from a GGUF file's metadata to a Hugging Face folder.

A GGUF file has the tokens and merges, and a name for the rule that splits a text before merging
(`tokenizer.ggml.pre`). The rule's regular expression is not in the file. Each known name has the
rule of the tokenizer.json that the model was published with. An unknown name is rejected, because
a wrong rule gives wrong token ids without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as splits
from tokenizers.pre_tokenizers import PreTokenizer

PREFIX = "tokenizer.ggml."
# Control tokens that end an answer whatever the metadata says, as in llama.cpp.
END_TEXTS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>")
NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Of tiktoken's cl100k, with the number of digits that stay together.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5  # fills the vocabulary up to the rows of the embedding


@dataclass(frozen=True, slots=True)
class _Rules:
    split: PreTokenizer
    has_nfc: bool = False  # the text is normalised
    ignores_merges: bool = False  # a word that is a token is not merged
    adds_bos: bool = False  # without `add_bos_token` in the metadata


def _byte_level(*before: PreTokenizer, splits_words: bool) -> PreTokenizer:
    last = splits.ByteLevel(add_prefix_space=False, use_regex=splits_words)
    return splits.Sequence([*before, last])


def _words(digits: str) -> PreTokenizer:
    return splits.Split(Regex(WORDS % digits), "isolated")


RULES = {
    "gpt-2": _Rules(_byte_level(splits_words=True)),
    "smollm": _Rules(_byte_level(splits.Digits(individual_digits=True), splits_words=True)),
    "qwen2": _Rules(_byte_level(_words(""), splits_words=False), has_nfc=True),
    "llama-bpe": _Rules(
        _byte_level(_words("{1,3}"), splits_words=False), ignores_merges=True, adds_bos=True
    ),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokenizer: Tokenizer
    config: Mapping[str, Any]  # content of tokenizer_config.json
    bos_id: int | None
    eos_ids: tuple[int, ...]


def read_vocabulary(metadata: Mapping[str, Any]) -> tuple[Vocabulary | None, list[str]]:
    """(vocabulary, []), or (None, all problems)."""
    found = []
    if (model := metadata.get(f"{PREFIX}model")) != "gpt2":
        found.append(f"{PREFIX}model is {model!r}, which is not supported; known: gpt2 (BPE)")
    rules = RULES.get(str(metadata.get(f"{PREFIX}pre")))
    if rules is None:
        pre = metadata.get(f"{PREFIX}pre")
        found.append(f"{PREFIX}pre is {pre!r}, which is not supported; known: {', '.join(RULES)}")
    tokens = _array(metadata, "tokens", str, found)
    merges = [tuple(each.split(" ")) for each in _array(metadata, "merges", str, found)]
    types = _array(metadata, "token_type", int, found)
    if not found and (len(types) != len(tokens) or len(set(tokens)) != len(tokens)):
        found.append(f"{PREFIX}tokens has a token twice, or {PREFIX}token_type another length")
    if rules is None or found:
        return None, found
    ids = {token: index for index, token in enumerate(tokens) if types[index] != TokenType.UNUSED}
    try:
        backend = Tokenizer(
            models.BPE(vocab=ids, merges=merges, ignore_merges=rules.ignores_merges)
        )
    except Exception as error:  # the library raises bare Exception
        return None, [f"{PREFIX}merges does not fit {PREFIX}tokens: {error}"]
    named = {
        name: tokens[index]
        for name, key in NAMED_IDS.items()
        if isinstance(index := metadata.get(PREFIX + key), int) and 0 <= index < len(tokens)
    }
    backend.pre_tokenizer = rules.split
    backend.normalizer = normalizers.NFC() if rules.has_nfc else None
    backend.decoder = decoders.ByteLevel()
    special = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(token, special=special[kind], normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in special
        ]
    )
    backend.post_processor = _post_processor(metadata, rules, named.get("bos_token"), ids)
    eos = [metadata.get(f"{PREFIX}{name}_token_id") for name in ("eos", "eot", "eom")]
    eos += [
        ids[text] for text in END_TEXTS if text in ids and types[ids[text]] == TokenType.CONTROL
    ]
    eos_ids = tuple(dict.fromkeys(each for each in eos if isinstance(each, int)))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **named,
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return Vocabulary(backend, config, ids.get(named.get("bos_token", "")), eos_ids), []


def _array(metadata: Mapping[str, Any], key: str, kind: type, found: list[str]) -> list[Any]:
    value = metadata.get(PREFIX + key)
    if isinstance(value, list) and all(isinstance(each, kind) for each in value):
        return value
    found.append(f"{PREFIX}{key} is missing, or is no array of {kind.__name__}")
    return []


def _post_processor(
    metadata: Mapping[str, Any], rules: _Rules, bos: str | None, ids: Mapping[str, int]
) -> processors.PostProcessor:
    """Puts BOS before a text if the model wants it."""
    byte_level = processors.ByteLevel(trim_offsets=False)
    if bos is None or not metadata.get(f"{PREFIX}add_bos_token", rules.adds_bos):
        return byte_level
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, ids[bos])]
    )
    return processors.Sequence([byte_level, template])
