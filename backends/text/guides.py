"""Guided decoding: answers that follow a JSON schema, a regular expression or a grammar.

llguidance compiles a grammar from this text and the tokenizer's vocabulary. The grammar is cached.
Each process compiles its own grammars, because a compiled grammar cannot be sent. Requests with the
same text wait for one compilation; requests with other texts do not. Rejections are cached, too.

An `AnswerGuide` is the grammar matcher of one answer. Its state depends only on the tokens of the
answer. A worker that continues an answer, such as a decode worker after prefill, creates a new
matcher and feeds the answer's earlier tokens into it.

The end ids of the request are allowed only where the answer is complete. The white space between
two parts of an answer is at most one space, or one new line with its indentation. Otherwise a small
model may fill the rest of its context with white space.

llguidance is an optional extra (`guided`). Not here: schemas that are rejected before compilation
(json_schema.py), sampling the tokens (engine/sampling.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.errors import InvalidRequest
from backends.extras import install_line
from backends.tensors import GRAMMAR, JSON_SCHEMA, REGEX, TAGS, guide_name
from backends.text.json_schema import constraints_of, keywords_in, read_schema
from backends.text.schema_size import schema_nodes
from backends.text.structural_tags import ThinkingTag, read_tag
from backends.text.tokenizer import Tokenizer

GRAMMARS_MAX = 64  # compiled grammars in the cache
# Sum of the weights of all cached grammars, in nodes of 8 KB (schema_size.py): 160 MB per process.
GRAMMARS_NODES_MAX = 20_000
# A grammar's weight is its nodes, plus NODES_OF_ONE, plus one for each BYTES_OF_NODE of its text.
NODES_OF_ONE, BYTES_OF_NODE = 64, 256
# Limits of an expression or grammar: 36 MB of lexer states, and about 30 ms for a token. With
# llguidance's own limits these are 150 MB and 1 s.
TEXT_LIMITS = {"max_lexer_states": 60_000, "max_items_in_row": 500}
# Weight of an expression or grammar. An expression without repetition has about a lexer state for
# each byte, and the states of BYTES_OF_STATES bytes are as large as one node.
NODES_OF_TEXT, BYTES_OF_STATES, REPETITION = 2_500, 13, frozenset("*+?{")
STACK_BYTES = 256 * 2**20  # stack of a compiling thread; only a deep schema uses much of it
_STACK_SIZE = threading.Lock()  # guards threading.stack_size, which is global to the process
GRAMMAR_FORMAT = "grammar"  # llguidance's name of "Lark or GBNF"
INDENTATION_MAX = 16  # spaces and tabs after a new line
MISSING = f"needs the package llguidance, which this server does not have: {install_line('guided')}"
OPTIONS: dict[str, Any] = {
    "whitespace_pattern": rf"(\x20|\r?\n[\x20\t]{{0,{INDENTATION_MAX}}})",
    "coerce_one_of": False,
    "lenient": False,
    # Without \\u. Otherwise "\\u0061" would be accepted as a property name that differs from "a".
    "json_allowed_escapes": '"\\bfnrt',
}


def is_installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


class AnswerGuide:
    """The grammar matcher of one answer. Not thread-safe."""

    def __init__(
        self, matcher: Any, vocabulary: _Vocabulary, end_ids: Sequence[int], name: str
    ) -> None:
        """`name`: the input that has the grammar, for errors."""
        self._matcher, self._name = matcher, name
        self._vocabulary = vocabulary
        self._end_ids = list(end_ids)
        self._is_over = False  # True after an end id

    def allowed(self) -> NDArray[np.bool_]:
        """For each token id, whether it may be the next token.

        Raises InvalidRequest if no token is allowed, or if the matcher fails, for example because
        the schema's automata become too large during the answer.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise InvalidRequest(f"{self._name}: {_first_line(self._matcher.get_error())}")
        tokens = self._vocabulary.tokens
        allowed = np.unpackbits(bits, count=tokens, bitorder="little").view(np.bool_)
        is_complete = bool(allowed[self._vocabulary.eos_ids].any())
        allowed[self._vocabulary.eos_ids] = False
        allowed[self._end_ids] = is_complete
        if not allowed.any():
            raise InvalidRequest(f"{self._name}: the model has no token that continues the answer")
        return allowed

    def copy(self) -> AnswerGuide:
        matcher = self._matcher.deep_copy()
        found = AnswerGuide(matcher, self._vocabulary, self._end_ids, self._name)
        found._is_over = self._is_over
        return found

    def advance(self, token_id: int) -> None:
        """Feed the answer's next token into the matcher. Raises InvalidRequest if the token is not
        allowed, or follows an end id."""
        if token_id in self._end_ids:
            self._is_over = True
        elif self._is_over or not self._matcher.consume_token(token_id):
            reason = _first_line(self._matcher.get_error())
            raise InvalidRequest(f"{self._name}: token {token_id} is not allowed next ({reason})")


class _Vocabulary:
    """The tokenizer in llguidance's form. `tokens`: number of logits of one position."""

    def __init__(self, tokenizer: Tokenizer, tokens: int) -> None:
        import llguidance

        if not tokenizer.eos_ids:
            raise InvalidRequest("guided output needs a checkpoint with an end token")
        self.tokens = tokens
        self.eos_ids = [token_id for token_id in tokenizer.eos_ids if token_id < tokens]
        self.tokenizer = llguidance.LLTokenizer(
            tokenizer.to_json(), n_vocab=tokens, eos_token=self.eos_ids
        )

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Texts of special tokens -> their ids, without end tokens. llguidance counts each added
        token like <tool_call> as special, and matches it with no text of a grammar."""
        ids = set(filter(self.tokenizer.is_special_token, range(self.tokens))) - set(self.eos_ids)
        named = {
            self.tokenizer.decode_bytes([each]).decode("utf-8", "replace"): each for each in ids
        }
        return {text: each for text, each in named.items() if text != f"<[{each}]>"}


@dataclass(eq=False)
class _Grammar:
    """The compiled grammar of one text."""

    matcher: Future[Any] = field(default_factory=Future)  # matcher before any token, or the error
    nodes: int = NODES_OF_ONE  # weight in the cache


class Guides:
    """The compiled grammars of one model. Thread-safe."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocabulary_tokens: int) -> None:
        """`tokenizer` loads the tokenizer. It is not called before the first guided request."""
        self._tokenizer = tokenizer
        self._tokens = vocabulary_tokens
        self._reading = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._lock = threading.Lock()  # guards the cache; not held during compilation
        self._grammars: OrderedDict[bytes, _Grammar] = OrderedDict()  # digest -> grammar, LRU first

    def guide(
        self, text: str, end_ids: Sequence[int], output_ids: Sequence[int], kind: str = JSON_SCHEMA
    ) -> AnswerGuide:
        """The matcher of an answer after `output_ids`. Compiling a new text may take a second.

        `kind`: one of GUIDE_KINDS. A GRAMMAR is Lark in llguidance's dialect, or GBNF. Raises
        InvalidRequest for an invalid text or token, or without llguidance or an end id.
        """
        name = guide_name(kind)
        if not is_installed():
            raise InvalidRequest(f"{name} {MISSING}")
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._tokenizer(), self._tokens)
        digest = hashlib.sha256(f"{kind} {text}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            is_new = digest not in self._grammars
            grammar = self._grammars.setdefault(digest, _Grammar())
            self._grammars.move_to_end(digest)
        if is_new:
            self._compile(kind, text, digest, self._vocabulary, grammar)
        guide = AnswerGuide(grammar.matcher.result().deep_copy(), self._vocabulary, end_ids, name)
        for token_id in output_ids:
            guide.advance(token_id)
        return guide

    def _compile(
        self, kind: str, text: str, digest: bytes, vocabulary: _Vocabulary, grammar: _Grammar
    ) -> None:
        """Compile in a thread with a large stack, and wait for the thread.

        The compiler recurses into all parts and references of a text, and a stack overflow would
        kill the process. Errors other than InvalidRequest are not cached.
        """

        def compile_it() -> None:
            try:
                self._weigh(grammar, _nodes_of(kind, text))
                grammar.matcher.set_result(self._compiled(kind, text, vocabulary))
            except BaseException as error:  # every error must reach the waiting threads
                fail(error)

        def fail(error: BaseException) -> None:
            with self._lock:
                if not isinstance(error, InvalidRequest) and self._grammars.get(digest) is grammar:
                    del self._grammars[digest]
            grammar.matcher.set_exception(error)

        with _STACK_SIZE:
            before_bytes = threading.stack_size(STACK_BYTES)
            try:
                thread = threading.Thread(target=compile_it, name="grammar", daemon=True)
                thread.start()
            except BaseException as error:  # no memory for the stack
                fail(error)
                return
            finally:
                threading.stack_size(before_bytes)
        thread.join()

    def _weigh(self, grammar: _Grammar, nodes: int) -> None:
        """Set the grammar's weight, and evict least recently used grammars above the limits."""
        with self._lock:
            grammar.nodes = nodes
            total = sum(each.nodes for each in self._grammars.values())
            while len(self._grammars) > 1 and (
                len(self._grammars) > GRAMMARS_MAX or total > GRAMMARS_NODES_MAX
            ):
                # Threads that wait for the evicted grammar hold a reference to it.
                total -= self._grammars.popitem(last=False)[1].nodes

    def _compiled(self, kind: str, text: str, vocabulary: _Vocabulary) -> Any:
        """The matcher before any token. Raises InvalidRequest."""
        import llguidance

        name, keywords = guide_name(kind), ""
        if kind in (JSON_SCHEMA, *TAGS):
            schema = _checked_schema(kind, text)
            if kind in TAGS:
                grammar = tagged_grammar(kind, text, vocabulary.special_ids)
            else:
                grammar = llguidance.LLMatcher.grammar_from_json_schema(_guided(schema))
            keywords = f" (its keywords: {', '.join(sorted(keywords_in(schema)))})"
        elif kind == REGEX:
            grammar = llguidance.LLMatcher.grammar_from_regex(text)
        else:
            check_grammar(text)
            try:
                grammar = llguidance.grammar_from(GRAMMAR_FORMAT, text)
            except ValueError as error:
                raise InvalidRequest(f"{name} cannot be read: {_first_line(str(error))}") from None
        limits = llguidance.LLParserLimits(**TEXT_LIMITS) if _pattern(kind, text) else None
        matcher = llguidance.LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        if error := _error_at_first_tokens(matcher):
            raise InvalidRequest(f"{name} cannot be followed: {_first_line(error)}{keywords}")
        return matcher


def guided_schema(text: str) -> dict[str, Any]:
    """A JSON schema as llguidance gets it. Raises InvalidRequest."""
    return _guided(_checked_schema(JSON_SCHEMA, text))


def check_grammar(text: str) -> None:
    """Raises InvalidRequest if a grammar has a part whose check would be left out."""
    if "%json" in text:  # its schema would not be checked (json_schema.py)
        name = guide_name(GRAMMAR)
        raise InvalidRequest(f"{name}: %json is not supported; send a JSON schema instead")


def tagged_grammar(kind: str, text: str, special_ids: Mapping[str, int]) -> str:
    """The grammar of a tag in Lark. `kind`: one of TAGS. `special_ids`: texts of special tokens ->
    their ids. Raises InvalidRequest."""
    schema = _guided(_checked_schema(kind, text))
    return read_tag(kind, text).grammar(schema, special_ids)


def _checked_schema(kind: str, text: str) -> Any:
    schema, problems = read_schema(_schema_of(kind, text))
    if problems:
        raise InvalidRequest([f"{guide_name(kind)}: {problem}" for problem in problems])
    return schema


def _guided(schema: Any) -> dict[str, Any]:
    return {**constraints_of(schema), "x-guidance": OPTIONS}


def _schema_of(kind: str, text: str) -> str:
    return json.dumps(read_tag(kind, text).schema) if kind in TAGS else text


def _pattern(kind: str, text: str) -> str:
    """The expression or grammar that the answer follows; "" if it follows a schema."""
    if kind in TAGS:
        tag = read_tag(kind, text)
        return tag.pattern if isinstance(tag, ThinkingTag) else ""
    return "" if kind == JSON_SCHEMA else text


def _nodes_of(kind: str, text: str) -> int:
    """The weight of a grammar in the cache. A rejected schema has no nodes."""
    if pattern := _pattern(kind, text):
        is_repeated = kind == GRAMMAR or not REPETITION.isdisjoint(pattern)
        nodes = NODES_OF_TEXT if is_repeated else len(pattern) // BYTES_OF_STATES
    else:
        schema, problems = read_schema(_schema_of(kind, text))
        nodes = 0 if problems else schema_nodes(schema)
    return NODES_OF_ONE + nodes + len(text) // BYTES_OF_NODE


def _error_at_first_tokens(matcher: Any) -> str:
    """The error of a grammar, or "". One token is tried, because some errors appear after it."""
    probe = matcher if matcher.is_error() else matcher.deep_copy()
    if not probe.is_error():
        bits = np.frombuffer(probe.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if not probe.is_error() and len(allowed) and probe.consume_token(int(allowed[0])):
            probe.compute_bitmask()
    return str(probe.get_error())


@lru_cache(maxsize=4)
def guides_of(tokenizer: Tokenizer) -> Guides:
    """Grammars for a tokenizer without a model, to check schemas in a frontend."""
    return Guides(lambda: tokenizer, tokenizer.vocabulary_tokens)


def _first_line(error: str) -> str:
    """A short text for the client. llguidance's own errors also list states of the parser."""
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    if not lines:
        return "no answer satisfies it"
    if "regex parse error" in lines[0]:
        return f"pattern: {next(line for line in lines[1:] if line.startswith('error'))}"
    if "NoExtension" in lines[0]:
        return "no answer satisfies it"
    if lines[0].startswith("lexer error"):
        return f"a pattern, format or maxLength is too large ({lines[0]})"
    if lines[0].startswith("oneOf constraints"):
        return "oneOf: its cases are not provably exclusive; use anyOf"
    return lines[0][:200]
