"""A real `mooncake serve` over a copy of the model repository, and a client for its tests.

Ports, repository and state are the test's own; the server is stopped by its process id. Waiting is
always for a condition with a deadline.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as triton

from loadtest.harness import server as bench_server

ROOT = Path(__file__).resolve().parents[2]
READY_S_MAX = 240.0
TYPES = {
    "input_ids": "INT32",
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "end_id": "INT32",
    "top_k": "INT32",
    "stream_interval": "INT32",
    "stream": "BOOL",
    "return_decision": "BOOL",
    "exclude_input_in_output": "BOOL",
    "temperature": "FP32",
    "top_p": "FP32",
    "min_p": "FP32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "seed": "UINT64",
    "text_input": "BYTES",
    "stop_words": "BYTES",
    "messages": "BYTES",
    "beam_width": "INT32",
    "sampling_parameters": "BYTES",
    "guided_json": "BYTES",
    "guided_decoding_guide": "BYTES",
    "guided_decoding_guide_type": "BYTES",
    "return_log_probs": "BOOL",
    "top_logprobs": "INT32",
}
NUMPY = {
    "INT32": np.int32,
    "BOOL": np.bool_,
    "FP32": np.float32,
    "UINT64": np.uint64,
    "BYTES": np.object_,
}


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = 30.0) -> Any:
    """The first true value of `condition`; fails the test after `deadline_s`."""
    give_up_s = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < give_up_s, f"waited {deadline_s:.0f} s for {what}"
        time.sleep(0.05)  # poll
    return value


@dataclass(slots=True)
class Answer:
    """All messages of one request, put together."""

    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    cached_tokens: int = 0
    decision: dict[str, Any] = field(default_factory=dict)
    messages: int = 0
    error: str = ""


def tensor(name: str, value: Any, datatype: str | None = None) -> triton.InferInput:
    datatype = datatype or TYPES[name]
    items = value if isinstance(value, list | np.ndarray) else [value]
    if datatype == "BYTES":
        items = [item.encode() if isinstance(item, str) else item for item in items]
    array = np.array(items, dtype=NUMPY[datatype]).reshape(1, -1)
    made = triton.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


class Stream:
    """One request over its own gRPC stream; may be left in the middle."""

    def __init__(
        self,
        url: str,
        model: str,
        inputs: Sequence[triton.InferInput],
        parameters: Mapping[str, Any] | None = None,
        timeout_us: int | None = None,
    ) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_over = False
        self._client = triton.InferenceServerClient(url)
        self._client.start_stream(lambda result, error: self._messages.put((result, error)))
        try:
            self._client.async_stream_infer(
                model,
                list(inputs),
                enable_empty_final_response=True,
                parameters=dict(parameters or {}),
                timeout=timeout_us,
            )
        except BaseException:
            self.leave()
            raise

    def next(self, timeout_s: float = 60.0) -> Any:
        """The next result, or None at the end; an error is raised."""
        if self._is_over:
            return None
        result, error = self._messages.get(timeout=timeout_s)
        if error is not None:
            raise error
        final = result.get_response().parameters.get("triton_final_response")
        self._is_over = final is not None and final.bool_param
        if not result.get_response().outputs and self._is_over:
            return None
        return result

    def leave(self) -> None:
        """Go away as a client that is killed does."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def begun(self, tokens: int) -> Answer:
        """What came until so many tokens were there: messages hold more when somebody is slow."""
        answer = Answer()
        while len(answer.output_ids) < tokens:
            result = self.next()
            assert result is not None, f"ended after {len(answer.output_ids)} tokens"
            take(answer, result)
        return answer

    def all(self) -> Answer:
        answer = Answer()
        try:
            while (result := self.next()) is not None:
                take(answer, result)
        except triton.InferenceServerException as error:
            answer.error = str(error)
        finally:
            self._client.close()
        return answer


def take(answer: Answer, result: Any) -> None:
    answer.messages += 1
    ids = result.as_numpy("output_ids")
    answer.output_ids += [] if ids is None else ids.reshape(-1).tolist()
    answer.text += result.as_numpy("text_output").reshape(-1)[0].decode()
    answer.finish_reason = result.as_numpy("finish_reason").reshape(-1)[0].decode()
    answer.cached_tokens = int(result.as_numpy("cached_tokens").reshape(-1)[0])
    decision = result.as_numpy("decision")  # there if the request wanted one
    if decision is not None and (text := decision.reshape(-1)[0]):
        answer.decision |= json.loads(text)


class Server:
    """See the module docstring. `parameters` are set in every config.pbtxt that has them;
    `prepare` may change the copied repository further."""

    def __init__(
        self,
        folder: Path,
        state_dir: Path,
        parameters: Mapping[str, str],
        arguments: Sequence[str] = (),
        wait: bool = True,
        prepare: Callable[[Path], None] = lambda repository: None,
        ready_s_max: float = READY_S_MAX,
    ) -> None:
        self.repository = folder / "model_repository"
        shutil.copytree(ROOT / "model_repository", self.repository)
        bench_server.set_parameters(self.repository, "conductor", bench_server.FIXED_LIMITS)
        for name, value in parameters.items():
            for model in self.repository.iterdir():
                if model.is_dir():
                    self.edit(model.name, name, value, must_exist=False)
        prepare(self.repository)
        self.log = folder / "serve.log"
        self.state_dir = state_dir
        self.addresses = bench_server.free_addresses()
        self.process: subprocess.Popen[bytes] = bench_server.start(
            self.addresses,
            [
                "--model-repository",
                str(self.repository),
                "--state-dir",
                str(state_dir),
                "--store-bytes",
                "128M",
                "--self-check",
                "--ready-s-max",
                f"{ready_s_max:.0f}",
                *arguments,
            ],
            self.log,
        )
        if wait:
            bench_server.wait_ready(self.addresses, ready_s_max, self.process, self.log)

    def edit(self, model: str, name: str, value: str, must_exist: bool = True) -> None:
        path = self.repository / model / "config.pbtxt"
        pattern = rf'(key: "{name}" value {{ string_value: ")[^"]*(")'
        text, count = re.subn(pattern, rf"\g<1>{value}\g<2>", path.read_text())
        assert count or not must_exist, f"{model} has no parameter {name}"
        if count:
            path.write_text(text)

    def stream(
        self,
        model: str = "conductor",
        parameters: Mapping[str, Any] | None = None,
        timeout_us: int | None = None,
        **inputs: Any,
    ) -> Stream:
        tensors = [tensor(name, value) for name, value in inputs.items()]
        return Stream(self.addresses.grpc, model, tensors, parameters, timeout_us)

    def ask(
        self, model: str = "conductor", parameters: Mapping[str, Any] | None = None, **inputs: Any
    ) -> Answer:
        return self.stream(model, parameters, stream=True, **inputs).all()

    def post(
        self,
        path: str,
        body: Any,
        timeout_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://{self.addresses.http}{path}", data=data, headers=dict(headers or {})
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metrics(self) -> dict[str, float]:
        """Every sample of the metrics port: 'name{label="x"}' -> value."""
        with urllib.request.urlopen(self.addresses.metrics_url, timeout=10.0) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def metrics_pages(self) -> list[str]:
        """The metrics page; while the launcher is stopped the private ones that it is made of."""
        launcher = psutil.Process(self.process.pid)
        urls = [self.addresses.metrics_url]
        if launcher.status() == psutil.STATUS_STOPPED:
            running = [p for p in launcher.children() if p.status() != psutil.STATUS_ZOMBIE]
            arguments = [argument.partition("=") for p in running for argument in p.cmdline()]
            urls = [
                f"http://127.0.0.1:{port}/metrics"
                for name, _, port in arguments
                if name == "--metrics-port"
            ]
        return [urllib.request.urlopen(url, timeout=10.0).read().decode() for url in urls]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name and these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for sample, value in self.metrics().items()
            if sample.split("{")[0] == name and all(each in sample for each in wanted)
        )

    def is_idle(self) -> bool:
        """No page, slot or lease is in use, as the workers' own metrics say."""
        return not any(
            self.metric(name)
            for name in (
                "mooncake_pages_used",
                "mooncake_requests_running",
                "mooncake_requests_waiting",
                "mooncake_leases_held",
                "mooncake_requests_live",
            )
        )

    def ready(self, model: str) -> bool:
        return self._is_ready(model) is True

    def is_gone(self, model: str) -> bool:
        """It says so: no answer at all says nothing."""
        return self._is_ready(model) is False

    def _is_ready(self, model: str) -> bool | None:
        """None: nobody said."""
        states = bench_server.model_states(self.addresses)
        return None if isinstance(states, str) else states.get(model, False)

    def triton_log(self, triton: str = "") -> str:
        """Of one Triton ("frontend", or a worker's name), or of all, one after the other."""
        logs = self.state_dir / f"logs-{self.addresses.http.rpartition(':')[2]}"
        paths = [logs / f"{triton}.log"] if triton else sorted(logs.glob("*.log"))
        return "".join(path.read_text(errors="replace") for path in paths)

    stop_s_max = 60.0

    def stop(self, number: int = signal.SIGINT) -> float:
        """Seconds until the launcher had ended."""
        started_s = time.monotonic()
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
            self.process.wait(self.stop_s_max)
        return time.monotonic() - started_s


def leftovers(server: Server) -> list[str]:
    """Shared memory and processes that belong to this server's launcher."""
    prefix = f"mooncake-{server.process.pid}-"
    files = [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(prefix)]
    mine = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if prefix in arguments or f"repository-{server.addresses.http.split(':')[1]}" in arguments:
            mine.append(f"{folder.name}: {arguments[:120]}")
    return files + mine


def running(
    folder: Path,
    state_dir: Path,
    parameters: Mapping[str, str],
    arguments: Sequence[str] = (),
    prepare: Callable[[Path], None] = lambda repository: None,
    ready_s_max: float = READY_S_MAX,
) -> Iterator[Server]:
    """For fixtures: a server, stopped afterwards, that left nothing behind."""
    server = Server(
        folder, state_dir, parameters, arguments, prepare=prepare, ready_s_max=ready_s_max
    )
    try:
        yield server
    finally:
        server.stop()
    assert not leftovers(server), leftovers(server)
