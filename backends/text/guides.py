"""Answers that follow a JSON schema: which tokens may come next, by llguidance.

A grammar is compiled of the schema and of the tokenizer's vocabulary, once for each schema in each
process that needs it (what is compiled cannot be sent); who comes meanwhile with the same schema
waits, with another one does not, and a refusal is remembered too. A `SchemaGuide` is one answer's
place in it. The place follows from the tokens of the answer alone, so
whoever goes on with an answer (decode behind prefill, another pair behind a lost one) gives these
tokens and stands where the other stood.

An end id may come where the answer is complete and nowhere else, whichever tokens the request
chose as end ids. Between two parts of an answer there is one space, or a new line and what it is
indented by, or nothing: where a small model may, it fills the rest of its context with white space.

llguidance is an optional extra (`guided`). Not here: which schemas are refused before it sees them
(json_schema.py), drawing among the tokens (engine/sampling.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.errors import InvalidRequest
from backends.extras import install_line
from backends.text.json_schema import constraints_of, keywords_in, read_schema
from backends.text.schema_size import schema_nodes
from backends.text.tokenizer import Tokenizer

GRAMMARS_MAX = 64  # that are kept
# Nodes of all that are kept (schema_size.py), of 8 KB each: at most 160 MB in a process. A grammar
# has half a megabyte without any, and some memory for each byte of the schema's text.
GRAMMARS_NODES_MAX = 20_000
NODES_OF_ONE, BYTES_OF_NODE = 64, 256
STACK_BYTES = 256 * 2**20  # reserved, and used only as far as a schema goes down
_STACK_SIZE = threading.Lock()  # Python has one size for the stacks of all threads to come
INDENTATION_MAX = 16
MISSING = (
    "guided_json needs the package llguidance, which this server does not have: "
    f"{install_line('guided')}"
)
OPTIONS: dict[str, Any] = {
    "whitespace_pattern": rf"(\x20|\r?\n[\x20\t]{{0,{INDENTATION_MAX}}})",
    "coerce_one_of": False,
    "lenient": False,
    # Not \\u: with it a key passes for another name than the one that it is ("\\u0061" for "a").
    "json_allowed_escapes": '"\\bfnrt',
}


def is_installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


class SchemaGuide:
    """One answer's place in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: Any, vocabulary: _Vocabulary, end_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._end_ids = list(end_ids)
        self._is_over = False

    def allowed(self) -> NDArray[np.bool_]:
        """By token id: whether it may come next. Raises InvalidRequest where the grammar got lost,
        which happens to schemas that only their answers show to be too large."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise InvalidRequest(f"guided_json: {_first_line(self._matcher.get_error())}")
        tokens = self._vocabulary.tokens
        allowed = np.unpackbits(bits, count=tokens, bitorder="little").view(np.bool_)
        is_complete = bool(allowed[self._vocabulary.eos_ids].any())
        allowed[self._vocabulary.eos_ids] = False
        allowed[self._end_ids] = is_complete
        if not allowed.any():
            raise InvalidRequest("guided_json: the model has no token that goes on with the answer")
        return allowed

    def advance(self, token_id: int) -> None:
        """This token has come."""
        if token_id in self._end_ids:
            self._is_over = True
        elif self._is_over or not self._matcher.consume_token(token_id):
            said = _first_line(self._matcher.get_error())
            raise InvalidRequest(
                f"guided_json: token {token_id} is not in the grammar there ({said})"
            )


class _Vocabulary:
    """The tokenizer as llguidance wants it, with as many tokens as there are logits."""

    def __init__(self, tokenizer: Tokenizer, tokens: int) -> None:
        import llguidance

        if not tokenizer.eos_ids:
            raise InvalidRequest("guided_json needs a checkpoint with an end token")
        self.tokens = tokens
        self.eos_ids = [token_id for token_id in tokenizer.eos_ids if token_id < tokens]
        self.tokenizer = llguidance.LLTokenizer(
            tokenizer.to_json(), n_vocab=tokens, eos_token=self.eos_ids
        )


@dataclass(frozen=True, eq=False)
class _Grammar:
    """Of one schema: a matcher that was given no token, or the refusal, once it is compiled."""

    nodes: int
    matcher: Future[Any] = field(default_factory=Future)


class Guides:
    """Of one model. Thread-safe."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocabulary_tokens: int) -> None:
        """`tokenizer` is called when the first request wants a guide: most want none."""
        self._tokenizer = tokenizer
        self._tokens = vocabulary_tokens
        self._reading = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._lock = threading.Lock()  # guards the grammars; nobody compiles with it held
        self._grammars: OrderedDict[bytes, _Grammar] = OrderedDict()  # by digest, the latest last

    def guide(self, schema: str, end_ids: Sequence[int], output_ids: Sequence[int]) -> SchemaGuide:
        """Behind these tokens of an answer. Raises InvalidRequest with what is in the way. Takes as
        long as the schema's grammar, where it is new: call it where nobody waits."""
        if not is_installed():
            raise InvalidRequest(MISSING)
        vocabulary = self._read_vocabulary()
        text = schema.encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(text).digest()
        grammar, is_new = self._grammar(digest, schema)
        if is_new:
            self._compile(schema, vocabulary, grammar)
        guide = SchemaGuide(grammar.matcher.result().deep_copy(), vocabulary, end_ids)
        for token_id in output_ids:
            guide.advance(token_id)
        return guide

    def _read_vocabulary(self) -> _Vocabulary:
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._tokenizer(), self._tokens)
            return self._vocabulary

    def _grammar(self, digest: bytes, schema: str) -> tuple[_Grammar, bool]:
        """(what is compiled or will be, whether the caller has to)."""
        with self._lock:
            grammar = self._grammars.get(digest)
            if grammar is not None:
                self._grammars.move_to_end(digest)
                return grammar, False
        nodes = _nodes_of(schema)
        with self._lock:
            if (grammar := self._grammars.get(digest)) is not None:  # another thread was faster
                return grammar, False
            new = self._grammars[digest] = _Grammar(nodes)
            while len(self._grammars) > 1 and self._holds_too_much():
                self._grammars.popitem(last=False)  # who waits for it has it all the same
            return new, True

    def _holds_too_much(self) -> bool:
        nodes = sum(grammar.nodes for grammar in self._grammars.values())
        return len(self._grammars) > GRAMMARS_MAX or nodes > GRAMMARS_NODES_MAX

    def _compile(self, schema: str, vocabulary: _Vocabulary, grammar: _Grammar) -> None:
        """On a thread with a stack of its own: the compiler goes down all parts and references of a
        schema on it, and the process would die where it ends. What is no refusal is not kept."""

        def compile_it() -> None:
            try:
                grammar.matcher.set_result(self._compiled(schema, vocabulary))
            except BaseException as error:  # whoever waits must hear of it, whatever it is
                grammar.matcher.set_exception(error)
                if not isinstance(error, InvalidRequest):
                    self._forget(grammar)

        with _STACK_SIZE:
            before_bytes = threading.stack_size(STACK_BYTES)
            try:
                thread = threading.Thread(target=compile_it, name="grammar", daemon=True)
                thread.start()
            except BaseException as error:  # no memory for its stack
                self._forget(grammar)
                grammar.matcher.set_exception(error)
                return
            finally:
                threading.stack_size(before_bytes)
        thread.join()

    def _forget(self, grammar: _Grammar) -> None:
        with self._lock:
            for digest, kept in list(self._grammars.items()):
                if kept is grammar:
                    del self._grammars[digest]

    def _compiled(self, text: str, vocabulary: _Vocabulary) -> Any:
        import llguidance

        schema, problems = read_schema(text)
        if problems:
            raise InvalidRequest([f"guided_json: {problem}" for problem in problems])
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(constraints_of(schema)), overrides=OPTIONS
        )
        matcher = llguidance.LLMatcher(vocabulary.tokenizer, grammar, log_level=0)
        error = _error_at_first_tokens(matcher)
        if error:
            said = _first_line(error)
            keywords = sorted(keywords_in(schema))
            raise InvalidRequest(
                f"guided_json cannot be followed: {said} (its keywords: {', '.join(keywords)})"
            )
        return matcher


def _nodes_of(text: str) -> int:
    """What its grammar will weigh; a schema that is refused has none."""
    schema, problems = read_schema(text)
    nodes = 0 if problems else schema_nodes(schema)
    return NODES_OF_ONE + nodes + len(text) // BYTES_OF_NODE


def _error_at_first_tokens(matcher: Any) -> str:
    """Some mistakes, and schemas that are too large, only show there; "" where nothing is wrong."""
    probe = matcher if matcher.is_error() else matcher.deep_copy()
    if not probe.is_error():
        bits = np.frombuffer(probe.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if not probe.is_error() and len(allowed) and probe.consume_token(int(allowed[0])):
            probe.compute_bitmask()
    return str(probe.get_error())


@lru_cache(maxsize=4)
def guides_of(tokenizer: Tokenizer) -> Guides:
    """For who has a tokenizer and no model: the frontend, which refuses."""
    return Guides(lambda: tokenizer, tokenizer.vocabulary_tokens)


def _first_line(error: str) -> str:
    """Of a regex that cannot be parsed the last one; states of the parser are left out."""
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    if not lines:
        return "it leaves no answer"
    if lines[0].startswith("regex parse error"):
        return f"pattern: {lines[-1]}"
    if "NoExtension" in lines[0]:
        return "it leaves no answer"
    if lines[0].startswith("lexer error"):
        return f"pattern, format or maxLength: too large ({lines[0]})"
    if lines[0].startswith("oneOf constraints"):
        return "oneOf: it cannot be seen that its cases exclude each other; use anyOf"
    return lines[0][:200]
