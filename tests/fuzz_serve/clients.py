"""The clients: what they ask, what they must hear, and the judge of each answer as it comes.

An answer is right when its tokens are those of an undisturbed run, each once and in order, as far
as they go; it ends complete, or with an error of a known kind. A client whose frontend dies hears
that its connection broke, and is counted apart.

Not here: what the right answer is (engine.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backends.errors import ServingError
from backends.tensors import OUTPUTS
from mooncake_store.block_keys import block_keys, chain_seed
from tests.fuzz_serve import green
from tests.fuzz_serve.engine import LAYOUT, VOCABULARY, answer_of, blocks_of
from tests.fuzz_serve.loop import Loop, Process
from tests.fuzz_serve.site import Deployment

NAMES = frozenset({tensor.name for tensor in OUTPUTS} - {"decision"})
TIMEOUT_S = 40.0  # of its own, in some requests
SYSTEMS = 3  # prompts begin with one of so many prefixes


@dataclass
class Client:
    """One request; the frontend takes it for triton_io.Reply."""

    number: int
    prompt: list[int]
    tokens: int
    is_stream: bool
    timeout_ms: int
    frontend: Process
    asked_s: float
    world: Loop
    expected: list[int] = field(default_factory=list)
    got: list[int] = field(default_factory=list)
    outputs: frozenset[str] = NAMES
    has_left: bool = False
    end: str = ""  # how it ended; "" while it has not
    words: str = ""  # of the error that it ended with
    ended_s: float = 0.0

    def _must(self, holds: bool, what: str) -> None:
        if not holds:
            self.world.fail(f"request {self.number} {what}")

    def send(self, outputs: Mapping[str, np.ndarray], is_final: bool = False) -> None:
        self._must(not self.end, f"goes on after its end ({self.end})")
        before = len(self.got)
        self.got += outputs["output_ids"].tolist()
        got, right = self.got[before:], self.expected[before : len(self.got)]
        self._must(
            got == right, f"gets {got} after {before} tokens, an undisturbed run gives {right}"
        )
        if is_final:
            self._must(self.got == self.expected, f"ends after {len(self.got)} of {self.tokens}")
            self._end("finished")

    def finish(self) -> None:
        """The stream closes: behind its final message, or because nobody wants more."""
        if self.end != "finished":
            self._must(self.has_left, f"was cut off after {len(self.got)} tokens")
            self._end("cancelled")

    def fail(self, error: Exception) -> None:
        self._must(isinstance(error, ServingError), f"fails with {error!r}, which nobody knows")
        self.words = str(error)
        self._end(type(error).__name__)

    def is_cancelled(self) -> bool:
        return self.has_left

    def _end(self, how: str) -> None:
        self._must(not self.end, f"ended twice: {self.end}, then {how}")
        self.end, self.ended_s = how, self.world.now_s
        self.world.note(f"request {self.number} {how} with {len(self.got)} tokens")

    def inputs(self) -> dict[str, np.ndarray]:
        return {
            "input_ids": np.array(self.prompt, np.int32),
            "max_tokens": np.array([self.tokens], np.int32),
            "stream": np.array([self.is_stream], np.bool_),
        }

    def parameters(self) -> dict[str, Any]:
        return {"timeout_ms": self.timeout_ms} if self.timeout_ms else {}


class Clients:
    def __init__(self, world: Loop, site: Deployment) -> None:
        self.world, self.site = world, site
        self.all: list[Client] = []
        self.systems = [self._tokens(world.rng.choice((8, 12, 20))) for _ in range(SYSTEMS)]
        self.turns: list[list[int]] = []  # conversations that may go on

    def _tokens(self, count: int) -> list[int]:
        return [self.world.rng.randrange(VOCABULARY) for _ in range(count)]

    def _prompt(self) -> list[int]:
        rng = self.world.rng
        if self.turns and rng.random() < 0.4:  # the next turn: what was answered is in it
            return rng.choice(self.turns)[:40] + self._tokens(rng.randrange(1, 6))
        if rng.random() < 0.15:  # differs from another one in the last token of a block only
            system = rng.choice(self.systems)
            return [*system[:7], (system[7] + 1) % VOCABULARY, *self._tokens(rng.randrange(1, 6))]
        return rng.choice(self.systems) + self._tokens(rng.randrange(1, 12))

    def ask(self) -> None:
        """Somebody asks a frontend that is up, if there is one."""
        rng, there = self.world.rng, self.site.alive("frontend")
        there = [process for process in there if "frontend" in process.state]
        if not there:
            return
        frontend, prompt = rng.choice(there), self._prompt()
        tokens = rng.randrange(1, 10)
        client = Client(
            number=len(self.all),
            prompt=prompt,
            tokens=tokens,
            is_stream=rng.random() < 0.8,
            timeout_ms=int(TIMEOUT_S * 1000) if rng.random() < 0.2 else 0,
            frontend=frontend,
            asked_s=self.world.now_s,
            world=self.world,
            expected=answer_of(prompt, tokens),
        )
        self.all.append(client)
        if len(prompt) + tokens < 44:
            self.turns.append(prompt + client.expected)
        self.world.note(f"request {client.number}: {len(prompt)} tokens to {frontend.name}")
        frontend.on_end.append(lambda: self._frontend_died(client))
        green.spawn(frontend, lambda: self._submit(client), "client")
        if rng.random() < 0.12:
            self.world.at(self.world.now_s + rng.random() * 2.0, lambda _: self._leave(client))

    def _submit(self, client: Client) -> None:
        frontend = client.frontend.state.get("frontend")
        if frontend is None:  # it was asked to end just now: its Triton takes nothing more
            self._frontend_died(client)
        else:
            frontend.submit(client.inputs(), client.parameters(), client)

    def _leave(self, client: Client) -> None:
        if not client.end:
            self.world.note(f"request {client.number} leaves")
            client.has_left = True

    def _frontend_died(self, client: Client) -> None:
        if not client.end:
            client.end, client.ended_s = "connection broke", self.world.now_s

    def expected_blocks(self, fingerprint: str) -> dict[bytes, bytes]:
        """By its key, the bytes of every block that anybody could have stored."""
        seed, found = chain_seed(fingerprint), dict[bytes, bytes]()
        for client in self.all:
            tokens = client.prompt + client.expected
            keys = block_keys(tokens, LAYOUT.block_tokens, seed)
            found |= dict(zip(keys, blocks_of(tokens), strict=True))
        return found

    @property
    def waiting(self) -> list[Client]:
        return [client for client in self.all if not client.end]
