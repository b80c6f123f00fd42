"""The tokenizer and its chat template, from a GGUF file's metadata to a Hugging Face folder.

A GGUF file has the tokens and merges, and a name for the rule that splits a text before merging
(`tokenizer.ggml.pre`). The file does not have the rule itself. Each known name has the rule of the
tokenizer.json that these models were published with. An unknown name is rejected, because a wrong
rule gives wrong token ids without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as splits
from tokenizers.pre_tokenizers import PreTokenizer

PREFIX = "tokenizer.ggml."
# Values of `tokenizer.ggml.token_type`. Unused tokens only fill the vocabulary up.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
# Control tokens that end an answer, even if the metadata does not name them, as in llama.cpp.
END_TEXTS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>")
NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Of tiktoken's cl100k, with a place for the number of digits that stay together.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Rules:
    before: PreTokenizer | None  # splits before byte-level BPE; None: only GPT-2's expression does
    has_gpt2_split: bool  # GPT-2's expression splits (after `before`)
    has_nfc: bool = False  # the text is normalised
    ignores_merges: bool = False  # a word that is a token is not merged
    adds_bos: bool = False  # without `add_bos_token` in the metadata


RULES = {
    "gpt-2": _Rules(None, True),
    "smollm": _Rules(splits.Digits(individual_digits=True), True),
    "qwen2": _Rules(splits.Split(Regex(WORDS % ""), "isolated"), False, has_nfc=True),
    "llama-bpe": _Rules(
        splits.Split(Regex(WORDS % "{1,3}"), "isolated"), False, ignores_merges=True, adds_bos=True
    ),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokenizer: Tokenizer
    config: Mapping[str, Any]  # content of tokenizer_config.json
    special_ids: Mapping[str, Any]  # bos_token_id and eos_token_id, as in generation_config.json


def read_vocabulary(
    metadata: Mapping[str, Any], rows: int | None
) -> tuple[Vocabulary | None, list[str]]:
    """(vocabulary, []), or (None, all problems). `rows`: of the embedding; None: unknown."""
    model, pre = metadata.get(f"{PREFIX}model"), str(metadata.get(f"{PREFIX}pre"))
    found = []
    if model != "gpt2":
        found.append(f"{PREFIX}model is {model!r}, which is not supported; known: gpt2 (BPE)")
    if pre not in RULES:
        found.append(f"{PREFIX}pre is {pre!r}, which is not supported; known: {', '.join(RULES)}")
    tokens = _array(metadata, "tokens", str, found)
    merges = [tuple(each.split(" ")) for each in _array(metadata, "merges", str, found)]
    types = _array(metadata, "token_type", int, found)
    if not found and not len(types) == len(set(tokens)) == len(tokens) == (rows or len(tokens)):
        found.append(f"{PREFIX}tokens does not fit {PREFIX}token_type or the rows of the embedding")
    if found:
        return None, found
    rules, ids = RULES[pre], {token: index for index, token in enumerate(tokens)}
    used = {token: index for token, index in ids.items() if types[index] != UNUSED}
    try:
        bpe = models.BPE(vocab=used, merges=merges, ignore_merges=rules.ignores_merges)
    except Exception as error:  # the library raises bare Exception
        return None, [f"{PREFIX}merges does not fit {PREFIX}tokens: {error}"]
    named = {
        name: tokens[index]
        for name, key in NAMED_IDS.items()
        if isinstance(index := metadata.get(PREFIX + key), int) and index in used.values()
    }
    special = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
    added = [
        AddedToken(token, special=special[kind], normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in special
    ]
    bos = named.get("bos_token")
    adds_bos = metadata.get(f"{PREFIX}add_bos_token", rules.adds_bos)
    backend = _tokenizer(bpe, rules, added, bos if adds_bos else None)
    eos_ids = [metadata.get(f"{PREFIX}{name}_token_id") for name in ("eos", "eot", "eom")]
    eos_ids += [ids[text] for text in END_TEXTS if text in ids and types[ids[text]] == CONTROL]
    eos_ids = list(dict.fromkeys(index for index in eos_ids if index in used.values()))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **named,
    }
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    special_ids = {"bos_token_id": ids[bos] if bos else None, "eos_token_id": eos_ids}
    return Vocabulary(backend, config, special_ids), []


def _array(metadata: Mapping[str, Any], key: str, kind: type, found: list[str]) -> list[Any]:
    value = metadata.get(PREFIX + key)
    if isinstance(value, list) and all(type(each) is kind for each in value):
        return value
    found.append(f"{PREFIX}{key} is missing, or is no array of {kind.__name__}")
    return []


def _tokenizer(
    bpe: models.BPE, rules: _Rules, added: list[AddedToken], bos: str | None
) -> Tokenizer:
    """`bos`: the token that begins every text; None: no token does."""
    backend = Tokenizer(bpe)
    last = splits.ByteLevel(add_prefix_space=False, use_regex=rules.has_gpt2_split)
    backend.pre_tokenizer = splits.Sequence([rules.before, last]) if rules.before else last
    backend.normalizer = normalizers.NFC() if rules.has_nfc else None
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(added)
    post: processors.PostProcessor = processors.ByteLevel(trim_offsets=False)
    if bos is not None:
        begins = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B:1",
            special_tokens=[(bos, backend.token_to_id(bos))],
        )
        post = processors.Sequence([post, begins])
    backend.post_processor = post
    return backend
