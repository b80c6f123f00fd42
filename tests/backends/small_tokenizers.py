"""Small tokenizers of each kind, trained or written down in a moment, and checkpoint folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from backends.text.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[2] / "backends" / "demo_checkpoint"
EOS, BOS, USER, ASSISTANT = "<eos>", "<bos>", "<user>", "<assistant>"
TEXTS = [
    "hello world, the quick brown fox jumps over the lazy dog.\n\nSTOP! Observation: 42",
    "été à Zürich – €5, naïve café; 日本語のテキスト; 😀👍🏽 emoji 👨‍👩‍👧",
    "def f(x):\n    return x + 1  # Привет, мир",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] }}{{ eos_token }}"
    "{% else %}<user>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_level(adds_bos: bool = False) -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and the demo: characters are spread over tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[EOS, BOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_tokens([tokenizers.AddedToken("<think> é", special=False)])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: pieces with a mark for the space, bytes for what is unknown."""
    pieces = [
        "▁",
        "▁hello",
        "▁the",
        "▁world",
        "the",
        "o",
        "a",
        "é",
        "▁é",
        "ST",
        "OP",
        "S",
        "T",
        ".",
    ]
    vocabulary = [("<unk>", 0.0), (BOS, 0.0), (EOS, 0.0)]
    vocabulary += [(f"<0x{value:02X}>", -20.0) for value in range(256)]
    vocabulary += [(piece, -2.0 - index / 10) for index, piece in enumerate(pieces)]
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", BOS, EOS])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """As T5: whole characters only, the first space is not there."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", EOS], show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """As BERT: a space before each token that does not begin with ##."""
    words = ["<unk>", EOS, "hello", "world", "the", ".", ",", "##s", "##ing", "sing", "STOP"]
    backend = tokenizers.Tokenizer(
        models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(["<unk>", EOS])
    return backend


def byte_level_and_more() -> tokenizers.Tokenizer:
    """A byte-level decoder followed by another: only the difference of texts can tell."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("#", "№")])
    return backend


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "byte_level_and_more": byte_level_and_more,
}


def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), {"eos_token": EOS})


def write_checkpoint(
    folder: Path, backend: tokenizers.Tokenizer, tokenizer_config: Mapping[str, Any], **files: Any
) -> Path:
    """tokenizer.json, tokenizer_config.json and, by name, other JSON files."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    written = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
