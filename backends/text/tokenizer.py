"""A checkpoint's tokenizer: text to token ids and back, and its chat template.

The files of a Hugging Face folder are read with the `tokenizers` library alone, because importing
transformers takes seconds in every process. transformers 5 applies these rules after it has read
tokenizer.json, and so does this module:

* Tokens that only tokenizer_config.json or added_tokens.json lists are added.
* The named tokens (bos, eos, ...) become special, even if tokenizer.json flags them otherwise.
  Exception: added tokens of tokenizer.json that are missing in an existing added_tokens_decoder.
* Truncation and padding that a training script left in tokenizer.json are switched off.
* tokenizer.json decides whether a BOS is added. `add_bos_token` is ignored, unlike in
  transformers 4.

End tokens are, as in vLLM, the tokenizer's eos_token and the eos_token_id of generation_config.json
(if it has none, of config.json). `clean_up_tokenization_spaces` is ignored, because it would change
text that has been streamed already. Not here: streaming text (text_stream.py), the chat template's
environment (chat_template.py).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from backends.errors import ConfigError, InvalidRequest
from backends.text import chat_template
from backends.text.token_bytes import TokenBytes, token_bytes

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
EXTRA_TOKENS, OLDER_EXTRA_TOKENS = "extra_special_tokens", "additional_special_tokens"
AddedToken = tokenizers.AddedToken


class Tokenizer:
    """Thread-safe: immutable after loading, except for caches."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        model_vocabulary_tokens: int | None = None,  # vocab_size of config.json; None: unknown
    ) -> None:
        self._backend = backend
        self._model_vocabulary_tokens = model_vocabulary_tokens
        self._templates = chat_template.templates(config.get("chat_template"))
        named = _settle(backend, config)
        self._special_tokens = {name: str(token) for name, token in named.items()}
        eos = self._special_tokens.get("eos_token")
        eos_id = None if eos is None else backend.token_to_id(eos)
        self.eos_ids: tuple[int, ...] = () if eos_id is None else (eos_id,)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Raises ConfigError if tokenizer.json is missing, or a file is damaged."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(
                f"{path} is missing; the checkpoint must hold a fast tokenizer "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one)"
            )
        try:
            # from_file would reject a path that is not UTF-8 in this process's locale.
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except Exception as error:  # the library raises bare Exception for any damage
            raise ConfigError(f"{path} cannot be read: {error}; fetch the file again") from None
        config = _read_json(folder / "tokenizer_config.json") | _template_file(folder)
        if not config.get(EXTRA_TOKENS) and OLDER_EXTRA_TOKENS in config:
            config[EXTRA_TOKENS] = config.pop(OLDER_EXTRA_TOKENS)
        if config.get("added_tokens_decoder") is None:  # read the older files, as transformers does
            config = _with_older_names(config, _read_json(folder / "special_tokens_map.json"))
            added_tokens = _read_json(folder / "added_tokens.json")
            config["added_tokens_decoder"] = _older_table(config, added_tokens, backend)
        try:
            tokenizer = cls(backend, config, _model_vocabulary_tokens(folder))
        except TypeError as error:  # raised by the library for a flag that is not a bool
            raise ConfigError(f"{folder}: the added tokens cannot be read: {error}") from None
        tokenizer.eos_ids = tuple(dict.fromkeys(_end_ids(folder) + tokenizer.eos_ids))
        return tokenizer

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The token ids of a text. `add_special`: add the special tokens of tokenizer.json, such as
        BOS. Raises InvalidRequest, for example for lone surrogates."""
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special).ids)
        except Exception as error:  # the library raises no narrower class
            raise InvalidRequest(f"the text cannot be tokenised: {error}") from None

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of a whole output. Ids outside the vocabulary (also negative) add no text."""
        known = [token_id for token_id in token_ids if token_id >= 0]
        return str(self._backend.decode(known, skip_special_tokens=skip_special))

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat, up to the beginning of the assistant's answer. `options`: variables
        of the template, as for transformers' apply_chat_template.

        Encode the prompt with add_special=False, because the template itself writes BOS. Raises
        InvalidRequest if there is no template, or if the template rejects the messages.
        """
        if not self._templates:
            raise InvalidRequest(
                "this checkpoint has no chat template; send text_input (in OpenAI's interface: "
                "/v1/completions) instead of messages"
            )
        return chat_template.render(self._templates, messages, self._special_tokens, tools, options)

    def chat_source(self, has_tools: bool = False) -> str:
        """The chat template's text; "" without one. Raises InvalidRequest as `apply_chat` does."""
        return chat_template.source_of(self._templates, has_tools) if self._templates else ""

    @cached_property
    def vocabulary_tokens(self) -> int:
        """The tokenizer's highest id plus one, but at most the size of the model's vocabulary.

        The model's vocabulary may be larger, because it is padded. It may be smaller than the
        tokenizer's. In that case the last added tokens have no embedding.
        """
        found = self._own_vocabulary_tokens
        return min(found, self._model_vocabulary_tokens or found)

    @cached_property
    def _own_vocabulary_tokens(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes that each token adds to the text, for streaming."""
        return token_bytes(self._backend)

    def to_json(self) -> str:
        """The tokenizer in the format of tokenizer.json, with the module docstring's rules applied.
        Added tokens without an embedding in the model are omitted."""
        written = str(self._backend.to_str())
        if self._own_vocabulary_tokens == self.vocabulary_tokens:
            return written
        content = json.loads(written)
        content["added_tokens"] = [
            token for token in content["added_tokens"] if token["id"] < self.vocabulary_tokens
        ]
        return json.dumps(content)


def _settle(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any]
) -> dict[str, str | AddedToken]:
    """Apply the rules of transformers' TokenizersBackend after reading tokenizer.json.

    Returns the named special tokens. As in transformers, added tokens get the next free ids. The
    ids in the files only define the order.
    """
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    known = backend.get_added_tokens_decoder()
    decoder = config.get("added_tokens_decoder")
    table = known if decoder is None else _table(decoder)
    listed = [table[token_id] for token_id in sorted(table)]  # their flags replace known flags
    named = _named_tokens(config, {token.content: token for token in listed})
    tokens: list[str | AddedToken] = list(listed)
    contents = {token.content for token in (*known.values(), *listed)}
    for token in (*named.values(), *map(_token, _extra_tokens(config))):
        if str(token) not in contents and token not in tokens:
            tokens.append(token)
    names = {str(token) for token in named.values()}
    backend.add_tokens([_as_added(token, names) for token in tokens])
    return named


def _table(decoder: Any) -> dict[int, AddedToken]:
    if not isinstance(decoder, Mapping) or not all(key.isdecimal() for key in decoder):
        raise ConfigError("tokenizer_config.json: added_tokens_decoder must map ids to tokens")
    tokens = {int(token_id): _token(each) for token_id, each in decoder.items()}
    return {token_id: _as_added(token, ()) for token_id, token in tokens.items()}


def _named_tokens(
    config: Mapping[str, Any], listed: Mapping[str, AddedToken]
) -> dict[str, str | AddedToken]:
    """Name -> token: first NAMED_TOKENS, then a checkpoint's own names, such as image_token."""
    found: dict[str, str | AddedToken] = {}
    for name in NAMED_TOKENS:
        if config.get(name) is not None:
            token = _token(config[name])
            found[name] = listed.get(str(token), token)
    own = {name: each for name, each in config.items() if name.endswith("_token")}
    for kinds in ((dict, AddedToken), str):  # tokens with flags first, as in transformers
        for name, each in own.items():
            if isinstance(each, kinds) and name not in NAMED_TOKENS:
                found[name] = _token(each)
    extra = config.get(EXTRA_TOKENS)
    if isinstance(extra, dict):
        found |= {name: _token(each) for name, each in extra.items()}
    return found


def _extra_tokens(config: Mapping[str, Any]) -> list[Any]:
    """Special tokens without a name, as tokenizer_config.json has them: strings or objects."""
    extra = config.get(EXTRA_TOKENS)
    if extra is None or isinstance(extra, dict):
        extra = config.get(OLDER_EXTRA_TOKENS)
    return list(extra or ())


def _token(written: Any) -> str | AddedToken:
    """Parse a token, which is a string, or an object with its `content` and flags."""
    if isinstance(written, (str, AddedToken)):
        return written
    if not isinstance(written, dict) or not isinstance(written.get("content"), str):
        raise ConfigError(f"the tokenizer's config files: {written!r} is not a token")
    flags = {flag: written[flag] for flag in TOKEN_FLAGS if flag in written}
    return AddedToken(written["content"], **flags)


def _as_added(token: str | AddedToken, named: Collection[str]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if token.content in named:
        token.special = True
    return token


def _with_older_names(config: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Let special_tokens_map.json (`names`) replace values of the config. Exceptions: a token with
    a checkpoint's own name keeps the config's string, and extra tokens of both files are joined."""

    def special(token: Any) -> Any:
        return _token({**token, "special": True}) if isinstance(token, dict) else token

    merged = dict(config)
    for name, each in names.items():
        if name == EXTRA_TOKENS and isinstance(each, list):
            merged[name] = [*_extra_tokens(config), *map(special, each)]
        elif isinstance(each, list):
            merged[name] = [special(token) for token in each]
        elif name in NAMED_TOKENS:
            merged[name] = special(each)
        elif name.endswith("_token"):  # becomes an AddedToken: `_named_tokens` puts it first
            own = merged.pop(name) if isinstance(config.get(name), str) else each
            merged[name] = special({"content": own} if isinstance(own, str) else own)
        elif isinstance(each, dict):  # more named tokens
            merged[name] = each
    return merged


def _older_table(
    config: Mapping[str, Any], added_tokens: Mapping[str, Any], backend: tokenizers.Tokenizer
) -> dict[str, Any]:
    """added_tokens.json (token -> id) in the format of added_tokens_decoder, together with the
    added tokens of tokenizer.json, which replace entries of the same id."""
    # As in transformers, a token that is an object in the config does not count as special here.
    names = [config[name] for name in NAMED_TOKENS if config.get(name)]
    names += config.get(EXTRA_TOKENS) if isinstance(config.get(EXTRA_TOKENS), list) else []
    special = {str(each) for each in names if isinstance(each, (str, AddedToken))}
    table: dict[str, Any] = {}
    for content, token_id in added_tokens.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ConfigError(f"added_tokens.json: the id of {content!r} is {token_id!r}")
        is_special = content in special
        flags = {"normalized": not is_special, "special": is_special}
        table[str(token_id)] = {"content": content, **flags}
    own = backend.get_added_tokens_decoder().items()
    return table | {str(token_id): token for token_id, token in own}


def _end_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        found = _model_value(folder / name, "eos_token_id")
        if found is None:
            continue
        token_ids = found if isinstance(found, list) else [found]
        if not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):  # no bool
            raise ConfigError(f"{folder / name}: eos_token_id is {found!r}; give an id or a list")
        return tuple(token_ids)
    return ()


def _model_vocabulary_tokens(folder: Path) -> int | None:
    found = _model_value(folder / "config.json", "vocab_size")
    return found if type(found) is int and found > 0 else None


def _model_value(path: Path, key: str) -> Any:
    """The value of `key` in the file, else in its `text_config` (multimodal models), else None."""
    content = _read_json(path)
    found = content.get(key)
    return (content.get("text_config") or {}).get(key) if found is None else found


def _template_file(folder: Path) -> dict[str, Any]:
    """The chat template from its own file, which replaces the config's; {} if there is no file."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return {"chat_template": path.read_text(encoding="utf-8")}
        except ValueError as error:
            raise ConfigError(f"{path} is not UTF-8: {error}") from None
    return _read_json(folder / "chat_template.json")


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file; {} if there is no file. Raises ConfigError for other content."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content
