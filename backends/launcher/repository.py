"""What a Triton says of its models, in words an operator can use.

Here: which of them are ready, and why one is not (Triton's reason without its boilerplate). Not
here: starting Triton (triton_process.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ASK_S_MAX = 2.0
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever http_proxy says
Ask = Callable[[str], bool | None]  # is this model ready? None: Triton does not answer


@dataclass(frozen=True, slots=True)
class ModelState:
    name: str
    is_ready: bool


def ask_http(address: str) -> Ask:
    def ask(model: str) -> bool | None:
        try:
            url = f"http://{address}/v2/models/{model}/ready"
            with DIRECTLY.open(url, timeout=ASK_S_MAX) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False
        except OSError:
            return None

    return ask


def ask_grpc(address: str) -> Ask:
    import grpc  # here, for who only reads logs
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    def ask(model: str) -> bool | None:
        # Each question gets a channel of its own, because one that was refused once waits before
        # it connects again.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        with contextlib.closing(grpc.insecure_channel(address, options)) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                request = service_pb2.ModelReadyRequest(name=model)
                return bool(stub.ModelReady(request, timeout=ASK_S_MAX).ready)
            except grpc.RpcError as error:
                silent = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                return None if error.code() in silent else False

    return ask


class TritonLog:
    """What Triton wrote of its models since it was read last."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._log_offset = 0
        # Why this incarnation of Triton serves without one of its ports: it goes on when one is
        # taken.
        self.service_problem = ""
        self._refused: dict[str, str] = {}  # model -> why its newest edit was refused

    def news(self) -> list[ModelLoad]:
        """Loads and refusals since the last call. Triton tries a refused model again at every
        poll; the same refusal is reported once, until the model has loaded or fails otherwise."""
        try:
            with self._log_path.open("rb") as log:
                if os.fstat(log.fileno()).st_size < self._log_offset:
                    self._log_offset = 0  # it was begun anew
                log.seek(self._log_offset)
                whole_lines = log.read().rpartition(b"\n")[0]
                self._log_offset += len(whole_lines)
        except OSError:
            return []
        text = whole_lines.decode(errors="replace")
        if problem := SERVICE.search(text):
            self.service_problem = problem[0].strip()
        found = []
        for load in loads(text):
            if load.reason and self._refused.get(load.model) == load.reason:
                continue
            self._refused.pop(load.model, None)
            if load.reason:
                self._refused[load.model] = load.reason
            found.append(load)
        return found


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Triton loaded a model, or refused to."""

    model: str
    reason: str = ""  # why not; "" when it is loaded


SERVICE = re.compile(r"failed to start \w+ service[^\"\n]*")
LOAD = re.compile(
    r"successfully loaded '(?P<loaded>[^']+)'"
    r"|failed to load '(?P<refused>[^']+)' version \d+: (?P<reason>.*?)(?=\n[EWIF]\d{4} |\Z)",
    flags=re.DOTALL,
)


def loads(log_text: str) -> list[ModelLoad]:
    """What Triton's log says of loading models, in its order."""
    return [
        ModelLoad(match["loaded"]) if match["loaded"] else ModelLoad(
            match["refused"], tidy_reason(match["reason"]))
        for match in LOAD.finditer(log_text)
    ]  # fmt: skip


def tidy_reason(reason: str) -> str:
    """Drop the traceback and status words that Triton wraps around a model's own message."""
    reason = reason.strip().removesuffix('"').replace("\\n", "\n")  # the log escapes line ends
    reason = re.sub(r"^(Internal|Invalid argument|Unavailable): ", "", reason)
    reason = re.sub(r"\n\nAt:\n.*", "", reason, flags=re.DOTALL)
    return re.sub(r"^(\w+Error|TritonModelException|ConfigError): ", "", reason.strip())
