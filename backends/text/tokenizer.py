"""A checkpoint's tokenizer: text to token ids and back, and its chat template.

Reads the files of a Hugging Face folder with the `tokenizers` library alone, because importing
transformers takes seconds in every process. What transformers 5 does beyond tokenizer.json is done
here: the named special tokens (bos, eos, ...) count as special although tokenizer.json may not say
so, and truncation and padding that a training script left behind are switched off. Whether a BOS
is added is up to tokenizer.json: like transformers 5, not 4, we ignore `add_bos_token` beside it.

End tokens are those of generation_config.json (config.json without it) and the tokenizer's own
eos_token, as in vLLM. `clean_up_tokenization_spaces` is not done: it would change text that has
been streamed already. Not here: streaming text (text_stream.py), the chat template's environment
(chat_template.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from backends.errors import ConfigError, InvalidRequest
from backends.text import chat_template
from backends.text.token_bytes import TokenBytes, token_bytes

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class Tokenizer:
    """Thread-safe: nothing changes after loading, except caches."""

    def __init__(
        self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], eos_ids: Sequence[int] = ()
    ) -> None:
        self._backend = backend
        self._special_tokens = _special_tokens(config)
        self._templates = chat_template.templates(config.get("chat_template"))
        _settle(backend, config, self._special_tokens)
        self.eos_ids = tuple(eos_ids) or self._ids_of("eos_token")
        self.bos_id = next(iter(self._ids_of("bos_token")), None)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Raises ConfigError, which names the file, when something is missing or damaged."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(
                f"{path} is missing; the checkpoint must hold a fast tokenizer "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for any damage
            raise ConfigError(f"{path} cannot be read: {error}; fetch the file again") from None
        config = _read_json(folder / "special_tokens_map.json")
        config |= _read_json(folder / "tokenizer_config.json")
        config |= _template_file(folder)
        tokenizer = cls(backend, config)
        tokenizer.eos_ids = _unique(_end_ids(folder) + tokenizer.eos_ids)
        return tokenizer

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """`add_special`: with BOS where the checkpoint wants it; false for rendered chats."""
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special).ids)
        except Exception as error:  # the library has no narrower one; a lone surrogate, say
            raise InvalidRequest(f"the text cannot be tokenised: {error}") from None

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of whole outputs; ids outside the vocabulary have none."""
        known = [token_id for token_id in token_ids if token_id >= 0]
        return str(self._backend.decode(known, skip_special_tokens=skip_special))

    def apply_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a chat, up to where the assistant's answer begins.

        Encode it with add_special=False: the template has written BOS itself.
        """
        if not self._templates:
            raise InvalidRequest(
                "this checkpoint has no chat template; send text_input instead of messages"
            )
        return chat_template.render(self._templates, messages, self._special_tokens)

    @cached_property
    def vocabulary_tokens(self) -> int:
        """The tokenizer's highest id plus one; a model's logits may be wider (padding)."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What each token adds to the text, for streaming."""
        return token_bytes(self._backend)

    def to_json(self) -> str:
        """The whole of it in the format of tokenizer.json, with what was settled after reading."""
        return str(self._backend.to_str())

    def _ids_of(self, name: str) -> tuple[int, ...]:
        token = self._special_tokens.get(name)
        token_id = None if token is None else self._backend.token_to_id(token)
        return () if token_id is None else (token_id,)


def _settle(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Do to the backend what transformers does after reading tokenizer.json."""
    backend.no_truncation()
    backend.no_padding()
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    listed = extra.values() if isinstance(extra, dict) else extra
    named = [*special.values(), *(_content(token) for token in listed)]
    backend.add_special_tokens([t for t in named if t and backend.token_to_id(t) is not None])


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _content(config.get(name)) for name in NAMED_TOKENS}
    return {name: token for name, token in found.items() if token}


def _content(token: Any) -> str:
    """A token is written as a string, or as an object with its `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _end_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        content = _read_json(folder / name)
        found = content.get("eos_token_id", (content.get("text_config") or {}).get("eos_token_id"))
        if found is None:
            continue
        token_ids = found if isinstance(found, list) else [found]
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in token_ids):
            raise ConfigError(f"{folder / name}: eos_token_id is {found!r}; it must be token ids")
        return tuple(token_ids)
    return ()


def _template_file(folder: Path) -> dict[str, Any]:
    """Newer checkpoints keep the template beside the config; the file wins."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return {"chat_template": path.read_text(encoding="utf-8")}
        except ValueError as error:
            raise ConfigError(f"{path} is not UTF-8: {error}") from None
    return _read_json(folder / "chat_template.json")


def _read_json(path: Path) -> dict[str, Any]:
    """{} if there is no such file: all but tokenizer.json are optional."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _unique(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token_ids))
