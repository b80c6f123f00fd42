"""The prompt's token ids: from text, from ids, or from chat messages. Exactly one of them.

`messages` is a JSON list of {"role", "content"}, content a string or a list of text parts as in
OpenAI's interface. Not here: whether the prompt leaves room for an answer (sampling_params.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backends.errors import InvalidRequest
from backends.frontend.values import InputReader, as_text, from_json, shown
from backends.text.tokenizer import Tokenizer

SOURCES = ("text_input", "input_ids", "messages")
MESSAGE_KEYS = ("role", "content")


def read(
    reader: InputReader, tokenizer: Tokenizer, vocabulary_tokens: int, text_bytes_max: int
) -> np.ndarray:
    """int32 ids; empty when there is a problem, which `reader` has then."""
    given = [name for name in SOURCES if reader.has(name)]
    problems_before = len(reader.problems)
    if len(given) != 1:
        what = f"the prompt is given {len(given)} times" if given else "there is no prompt"
        reader.note(f"{what}; send exactly one of {', '.join(SOURCES)}")
        return np.zeros(0, np.int32)
    try:
        token_ids = _token_ids(reader, given[0], tokenizer, text_bytes_max)
    except InvalidRequest as error:
        reader.note(f"{given[0]}: {error}")
        token_ids = np.zeros(0, np.int64)
    if token_ids.size == 0 and len(reader.problems) == problems_before:
        reader.note(f"the prompt is empty; put at least one token into {given[0]}")
    outside = np.flatnonzero((token_ids < 0) | (token_ids >= vocabulary_tokens))
    if outside.size:
        first = int(outside[0])
        reader.note(
            f"{given[0]} has {outside.size} token id(s) outside the vocabulary, the first is "
            f"{token_ids[first]} at index {first}; use 0 to {vocabulary_tokens - 1}"
        )
        return np.zeros(0, np.int32)
    return token_ids.astype(np.int32)


def _token_ids(
    reader: InputReader, source: str, tokenizer: Tokenizer, text_bytes_max: int
) -> np.ndarray:
    if source == "input_ids":
        values = reader.integers(source)
        return np.zeros(0, np.int64) if values is None else values
    text = reader.text(source, text_bytes_max)
    is_chat = source == "messages"
    if text and is_chat:
        messages = _messages(reader, text)
        text = tokenizer.apply_chat(messages) if messages else ""
    # An empty text would still get a BOS from some tokenizers: an answer to no question.
    token_ids = tokenizer.encode(text, add_special=not is_chat) if text else []
    return np.array(token_ids, np.int64)


def _messages(reader: InputReader, text: str) -> list[dict[str, str]]:
    """[] when there is a problem."""
    content, problem = from_json("messages", text)
    if not problem and (not isinstance(content, list) or not content):
        problem = f"messages is {shown(content)}; send a JSON list with at least one message"
    if problem:
        reader.note(problem)
        return []
    read = [_message(f"messages[{index}]", message) for index, message in enumerate(content)]
    problems = [problem for _, problem in read if problem]
    reader.note_some(problems)
    return [] if problems else [message for message, _ in read]


def _message(name: str, message: Any) -> tuple[dict[str, str], str]:
    """(message, "") or ({}, what is wrong)."""
    if not isinstance(message, dict):
        return {}, f"{name} is {shown(message)}; send an object with role and content"
    unknown = sorted(message.keys() - set(MESSAGE_KEYS))
    if unknown:
        return {}, f"{name} has {shown(unknown[0])}, which is not supported; send role and content"
    missing = [key for key in MESSAGE_KEYS if message.get(key) is None]
    if missing:
        return {}, f"{name} has no {missing[0]}"
    role, problem = as_text(f"{name}.role", message["role"])
    if problem or not role:
        return {}, problem or f"{name}.role is empty; send user, say"
    content, problem = _content(f"{name}.content", message["content"])
    return ({}, problem) if problem else ({"role": role, "content": content}, "")


def _content(name: str, content: Any) -> tuple[str, str]:
    """(text, "") or ("", what is wrong); several text parts become lines, as in vLLM."""
    if not isinstance(content, list):
        text, problem = as_text(name, content)
        return text or "", problem
    lines = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            return "", f"{name}[{index}] is {shown(part)}; only parts of type text are supported"
        text, problem = as_text(f"{name}[{index}].text", part.get("text"))
        if problem:
            return "", problem
        lines.append(text or "")
    return "\n".join(lines), ""
