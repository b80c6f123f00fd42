"""What `curl` sends: one answer, a stream, vLLM's way of asking, an error; and its own TTFT.

The end-to-end test sends the same calls and reads the answers. curl's `time_starttransfer` is its
TTFT: Triton sends no byte of a stream before the first message. Not here: what the server does.
"""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadtest.clients.environment import ClientFailed
from loadtest.clients.fresh_text import fresh_texts
from loadtest.clients.load import Load, Report

NAME = "curl"
CALL_S_MAX = 60


@dataclass(frozen=True, slots=True)
class Call:
    title: str
    path: str  # after /v2/models/
    body: Mapping[str, Any]


PROMPT = "It is a truth"
CALLS = (
    Call("one answer", "conductor/generate", {"text_input": PROMPT, "max_tokens": 8}),
    Call(
        "one answer of the ensemble, as TensorRT-LLM's documentation asks for it",
        "ensemble/generate",
        {"text_input": PROMPT, "max_tokens": 8, "bad_words": "", "stop_words": ""},
    ),
    Call(
        "a stream of server-sent events",
        "conductor/generate_stream",
        {"text_input": PROMPT, "max_tokens": 3, "stream": True},
    ),
    Call(
        "a stream of the ensemble",
        "ensemble/generate_stream",
        {"text_input": PROMPT, "max_tokens": 3, "stream": True},
    ),
    Call(
        "vLLM's sampling_parameters, whose numbers may be strings",
        "conductor/generate",
        {"text_input": PROMPT, "sampling_parameters": '{"max_tokens": "8", "temperature": "0"}'},
    ),
    Call(
        "as vLLM's backend is asked in its documentation",
        "conductor/generate",
        {"text_input": PROMPT, "parameters": {"stream": False, "temperature": 0, "max_tokens": 8}},
    ),
    Call("a mistake", "conductor/generate", {"text_input": PROMPT, "max_tokens": 0}),
)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    first_byte_s: float
    text: str


def command(call: Call, http: str) -> list[str]:
    url = f"http://{http}/v2/models/{call.path}"
    return [NAME, "-sS", "-N", url, "-d", json.dumps(call.body)]


def send(call: Call, http: str) -> Answer:
    """Raises ClientFailed when curl is not there or had no answer."""
    if shutil.which(NAME) is None:
        raise ClientFailed("there is no curl on the PATH; install it (apt-get install curl)")
    told = ["--max-time", str(CALL_S_MAX), "--write-out", "\n%{http_code} %{time_starttransfer}"]
    done = subprocess.run(
        [*command(call, http), *told], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClientFailed(f"curl: {done.stderr.strip()}")
    text, _, last = done.stdout.rpartition("\n")
    status, first_byte_s = last.split()
    return Answer(int(status), float(first_byte_s), text.strip())


def shown(call: Call, http: str) -> str:
    """The command as a person types it."""
    return shlex.join(command(call, http))


def run(load: Load, model: str) -> Report:
    """Fresh prompts, one after the other, each a process of its own; raises ClientFailed."""
    times_ms = []
    for prompt in fresh_texts(load):
        body = {
            "text_input": prompt,
            "max_tokens": load.output_tokens,
            "min_tokens": load.output_tokens,
            "stream": True,
        }
        answer = send(Call("", f"{model}/generate_stream", body), load.addresses.http)
        if answer.status != 200:
            raise ClientFailed(f"curl had status {answer.status}: {answer.text[:300]}")
        times_ms.append(answer.first_byte_s * 1_000.0)
    mean_ms, p50_ms = statistics.mean(times_ms), statistics.median(times_ms)
    table = f"time_starttransfer: mean {mean_ms:.2f} ms, median {p50_ms:.2f} ms"
    return Report(NAME, model, "synthetic", len(times_ms), mean_ms, p50_ms, table)
