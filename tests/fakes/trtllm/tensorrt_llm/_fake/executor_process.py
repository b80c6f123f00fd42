"""The executor in a process of its own, as the real one is: `python -m ..._fake.executor_process`.

It inherits what MPI would let through: variables that begin with TLLM or TRTLLM, and what Python
needs to start. Commands come as pickles on its standard input, and it ends with that; what it has
to say leaves on its standard output. TLLM_WORKER_USE_SINGLE_PROCESS=1 does without a process, as
there. All ranks are in the one process; each has its own connector worker all the same.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from typing import IO, Any

from tensorrt_llm._fake.executor import DEFAULT_KV_TOKENS, Executor
from tensorrt_llm._fake.kv_model import KvShape
from tensorrt_llm._fake.request import LlmRequest
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

PASSED_ON = ("TLLM", "TRTLLM", "FAKE_TRTLLM", "PATH", "PYTHON", "LD_LIBRARY_PATH", "HOME")
STOP_S_MAX = 20.0


class ProcessExecutor:
    """The parent's side: as an Executor that runs."""

    def __init__(self, args: TorchLlmArgs, shape: KvShape) -> None:
        cache = args.kv_cache_config
        self._limit = args.max_seq_len or cache.max_tokens or DEFAULT_KV_TOKENS
        self._has_connector = args.kv_connector_config is not None
        self.stats: deque[dict[str, Any]] = deque(maxlen=1000)
        self.error: BaseException | None = None
        self._requests: dict[int, LlmRequest] = {}
        self._lock = threading.Lock()
        environment = {
            name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tensorrt_llm._fake.executor_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._send((args, shape))
        assert self._process.stdout is not None
        try:
            kind, *said = pickle.load(self._process.stdout)
        except EOFError:
            kind, said = "failed", ["the process ended"]
        if kind == "failed":
            self._process.wait(STOP_S_MAX)
            raise RuntimeError(f"the executor did not start: {said[0]}")
        self._reader = threading.Thread(target=self._read, name="fake-proxy", daemon=True)
        self._reader.start()

    def start(self) -> None:
        """It runs already."""

    def submit(self, request: LlmRequest) -> None:
        if request.kind == "generation_only" and self._has_connector:
            raise RuntimeError("Connector API is not supported for generation-only requests!")
        if not request.prompt or len(request.prompt) + request.max_tokens > self._limit:
            raise ValueError(f"prompt and max_tokens must be 1 to {self._limit} tokens")
        if self.error is not None:
            raise RuntimeError(f"the executor failed: {self.error}")
        with self._lock:
            self._requests[request.request_id] = request
        self._send(
            (
                "submit",
                request.request_id,
                request.prompt,
                request.max_tokens,
                request.end_id,
                request.cache_salt,
                request.kind,
                request.opaque_state,
            )
        )

    def abort(self, request: LlmRequest) -> None:
        self._send(("abort", request.request_id))

    def shutdown(self) -> None:
        assert self._process.stdin is not None
        if self._process.poll() is None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_S_MAX)

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        with self._lock:
            try:
                pickle.dump(message, self._process.stdin)
                self._process.stdin.flush()
            except (OSError, ValueError):  # it has ended: whoever waits is told by _read
                return

    def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                kind, *said = pickle.load(self._process.stdout)
            except (EOFError, OSError, pickle.UnpicklingError):
                break
            if kind == "stats":
                self.stats.append(said[0])
            elif kind == "error":
                self.error = RuntimeError(said[0])
            else:
                request_id, token_ids, reason, opaque_state = said
                self._tell(request_id, token_ids, reason, opaque_state)
        self.error = self.error or RuntimeError("the executor's process has ended")
        for request_id in list(self._requests):
            self._tell(request_id, [], "cancelled", b"")

    def _tell(
        self, request_id: int, token_ids: list[int], reason: str | None, opaque_state: bytes
    ) -> None:
        with self._lock:
            request = self._requests.get(request_id)
            if reason is not None:
                self._requests.pop(request_id, None)
        if request is not None:
            request.opaque_state = opaque_state
            request.on_output(token_ids, reason)


class Child:
    """The process's side: an Executor that is told what to do."""

    def __init__(self, commands: IO[bytes], answers: IO[bytes]) -> None:
        self._commands = commands
        self._answers = answers
        self._lock = threading.Lock()
        self._requests: dict[int, LlmRequest] = {}

    def run(self) -> None:
        args, shape = pickle.load(self._commands)
        try:
            self._executor = Executor(args, shape)
        except BaseException as error:
            self._say("failed", f"{type(error).__name__}: {error}")
            raise
        self._executor.start()
        self._say("ready")
        while True:
            try:
                verb, *said = pickle.load(self._commands)
            except EOFError:
                break
            self._submit(*said) if verb == "submit" else self._abort(said[0])
        self._executor.shutdown()

    def _submit(
        self,
        request_id: int,
        prompt: list[int],
        max_tokens: int,
        end_id: int,
        salt: str | None,
        kind: str,
        opaque_state: bytes,
    ) -> None:
        request = LlmRequest(
            request_id, prompt, max_tokens, end_id, salt, kind=kind, opaque_state=opaque_state
        )
        request.on_output = lambda tokens, reason: self._output(request, tokens, reason)
        self._requests[request_id] = request
        try:
            self._executor.submit(request)
        except RuntimeError as error:
            self._say("error", str(error))
            self._output(request, [], "cancelled")

    def _abort(self, request_id: int) -> None:
        if request_id in self._requests:
            self._executor.abort(self._requests[request_id])

    def _output(self, request: LlmRequest, token_ids: list[int], reason: str | None) -> None:
        """In the executor's thread."""
        stats = self._executor.stats
        while stats:
            self._say("stats", stats.popleft())
        if reason is not None:
            self._requests.pop(request.request_id, None)
        if self._executor.error is not None:
            self._say("error", str(self._executor.error))
        state = request.opaque_state if request.kind == "context_only" else b""
        self._say("output", request.request_id, token_ids, reason, state)

    def _say(self, *message: Any) -> None:
        with self._lock:
            try:
                pickle.dump(message, self._answers)
                self._answers.flush()
            except OSError:  # nobody listens any more: the end of the commands is next
                return


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is not for the parent
    Child(sys.stdin.buffer, answers).run()


if __name__ == "__main__":
    main()
