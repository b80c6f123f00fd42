"""Adapter to Triton's Python backend API. No other file imports it, so all others run in pytest.

Translates requests to flat numpy arrays, replies to responses, errors to Triton errors with a code,
and metrics to series on Triton's metrics port. Reads the `parameters` of config.pbtxt.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb  # provided by Triton's stub

from backends import launch_secret
from backends.errors import (
    Forbidden,
    InvalidRequest,
    Overloaded,
    ServingError,
    WorkerDistrusts,
    WorkerUnavailable,
)
from backends.extras import explained
from backends.metrics.page import MetricPage
from backends.metrics.table import Metric
from backends.tensors import UNBATCHED_OUTPUTS, string_tensor
from backends.tracing.trace_context import TRACEPARENT
from backends.triton.metrics_loop import MetricsLoop, Publish
from backends.workers.protocol import (
    REPLY_BODY,
    REPLY_IDS,
    REQUEST_BODY,
    REQUEST_IDS,
    REQUEST_STOP,
    VERSION_PARAMETER,
    DecodeReply,
    PrefillReply,
    WorkerFailure,
    check_version,
    encode,
)
from mooncake_store.process import logs

log = logging.getLogger(__name__)

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def start_logging() -> None:
    """Log to stderr, which Triton's log file captures."""
    logs.start_logging("%(asctime)s %(levelname).1s %(name)s %(message)s", is_forced=True)


def parameters(args: Mapping[str, str]) -> tuple[str, dict[str, str], int]:
    """(model name, `parameters` of its config.pbtxt, number of instances) from `initialize`."""
    config = json.loads(args["model_config"])
    # Names with a leading underscore are the launcher's (launcher/repository.py).
    raw = {
        key: value["string_value"]
        for key, value in config.get("parameters", {}).items()
        if not key.startswith("_")
    }
    count = sum(int(group.get("count", 1)) for group in config.get("instance_group", [])) or 1
    return args["model_name"], raw, count


def repository_of(args: Mapping[str, str]) -> str:
    """The operator's model repository. The path in `args` may be the launcher's mirror of it."""
    path = Path(args["model_repository"])
    polled = path.parent if path.name == args["model_name"] else path
    return os.environ.get("MOONCAKE_REPOSITORY", str(polled))


def load_error(error: Exception) -> Exception:
    """An exception for `initialize` to raise. Triton logs its message without a traceback."""
    missing = explained(error) if isinstance(error, ImportError) else ""
    message = f"it {missing}" if missing else str(error)
    return pb.TritonModelException(_decodable(message))


def _decodable(message: str) -> str:
    """Replace surrogates (undecodable bytes of paths), because pybind11 would abort at them."""
    return message.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def inputs_of(request: Any) -> dict[str, np.ndarray]:
    """The request's tensors by name, flat."""
    return {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in request.inputs()}


def parameters_of(request: Any) -> dict[str, Any]:
    """The request's KServe parameters.

    Triton does not list its own parameter `timeout` (microseconds). This function adds its value
    as `timeout_ms`, except if the client sent `timeout_ms`.
    """
    text = request.parameters()
    found: dict[str, Any] = json.loads(text) if text else {}
    if timeout_us := int(request.timeout()):
        found.setdefault("timeout_ms", max(1, timeout_us // 1000))
    # Triton forwards a header in the spelling of the client, such as `Traceparent`.
    for name in [each for each in found if each != TRACEPARENT and each.lower() == TRACEPARENT]:
        found.setdefault(TRACEPARENT, found.pop(name))
    return found


class Reply:
    """Response stream of one request. Thread-safe. Calls after the final response do nothing."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self.outputs = frozenset(request.requested_output_names())  # all outputs by default
        self._lock = threading.Lock()
        self._is_closed = False

    def send(self, outputs: Mapping[str, np.ndarray], is_final: bool = False) -> None:
        self._send(response(outputs), is_final)

    def finish(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._sender.send(flags=FINAL)

    def fail(self, error: Exception) -> None:
        self._send(error_response(error), is_final=True)

    def is_cancelled(self) -> bool:
        """Whether the client cancelled or disconnected. False after the final response.

        Holds the lock, because a call of Triton's is_cancelled after the final response crashes the
        server (Triton 2.51: TRITONBACKEND_ResponseFactoryIsCancelled on a deleted factory).
        """
        with self._lock:
            return not self._is_closed and bool(self._sender.is_cancelled())

    def _send(self, response: Any, is_final: bool) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = is_final
            self._sender.send(response, flags=FINAL if is_final else 0)


@dataclass(frozen=True, slots=True)
class WorkerCall:
    body: Any  # PrefillRequest or DecodeRequest
    token_ids: np.ndarray  # int32 [tokens]


@dataclass(frozen=True, slots=True)
class StopCall:
    request_id: str  # the request to stop


def worker_call(request: Any, parse: Callable[[bytes], Any]) -> WorkerCall | StopCall:
    """Parse a call to a prefill or decode worker. `parse`: decodes the body of the request.

    Raises WorkerDistrusts for a wrong secret, and WorkerGone for another version of the protocol.
    Raises InvalidRequest for a missing secret or an invalid call.
    """
    parameters = parameters_of(request)
    given = parameters.get(launch_secret.SECRET_PARAMETER)
    if not given:
        raise InvalidRequest("workers serve only their own frontends; clients call `conductor`")
    if not launch_secret.is_right(given, launch_secret.secret_of_launch()):
        raise WorkerDistrusts(
            "worker and frontend have different secrets; if they run on two hosts, copy the key "
            "folders of both from their source again (`secret` must be equal), and restart both"
        )
    check_version(parameters.get(VERSION_PARAMETER))
    inputs = inputs_of(request)
    stop = inputs.get(REQUEST_STOP)
    if stop is not None and bool(stop[0]):
        return StopCall(str(request.request_id() or ""))
    missing = [name for name in (REQUEST_IDS, REQUEST_BODY) if name not in inputs]
    if missing:
        raise InvalidRequest(f"{', '.join(missing)} missing; clients call the conductor model")
    try:
        return WorkerCall(parse(inputs[REQUEST_BODY][0]), inputs[REQUEST_IDS])
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"{REQUEST_BODY} is not a worker request: {error}") from None


class WorkerReply(Reply):
    """The reply of a worker to its frontend, in the format of workers/protocol.py."""

    def prefilled(self, token_id: int, reply: PrefillReply) -> None:
        self._reply([token_id], reply)

    def decoded(self, token_ids: list[int], reply: DecodeReply) -> None:
        self._reply(token_ids, reply)

    def fail(self, error: Exception) -> None:
        self._reply([], WorkerFailure(error_message(error)))

    def _reply(self, token_ids: list[int], body: msgspec.Struct) -> None:
        ids = np.array(token_ids, np.int32)
        self.send({REPLY_IDS: ids, REPLY_BODY: string_tensor(encode(body))}, is_final=True)


def response(outputs: Mapping[str, np.ndarray]) -> Any:
    """One response. All arrays except UNBATCHED_OUTPUTS get a batch dimension of 1."""
    return pb.InferenceResponse(
        [
            pb.Tensor(name, value if name in UNBATCHED_OUTPUTS else value[np.newaxis])
            for name, value in outputs.items()
        ]
    )


def error_response(error: Exception) -> Any:
    codes = {
        InvalidRequest: pb.TritonError.INVALID_ARG,
        Forbidden: pb.TritonError.INVALID_ARG,
        Overloaded: pb.TritonError.UNAVAILABLE,
        WorkerUnavailable: pb.TritonError.UNAVAILABLE,
    }
    code = codes.get(type(error), pb.TritonError.INTERNAL)
    return pb.InferenceResponse(error=pb.TritonError(_decodable(error_message(error)), code))


def error_message(error: Exception) -> str:
    """The error text for the caller. Logs an unexpected error with its traceback."""
    if isinstance(error, ServingError):
        return error.wire_message()
    log.error("internal error", exc_info=error)
    return f"internal_error: {type(error).__name__}: {error}"


# Keeps metrics and families until the process exits. Freeing one while its model is loaded corrupts
# the memory of the whole server (Triton 2.51, docs/decisions/0010).
_METRICS_FOR_EVER: list[Any] = []


class MetricSeries:
    """Makes time series on Triton's metrics port, with the label `model` (for metrics/page.py)."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}

    def __call__(self, metric: Metric, labels: dict[str, str]) -> Any:
        """The series of a metric and labels. Later calls return the same series."""
        key = metric.name, tuple(sorted(labels.items()))
        if key not in self._series:
            self._series[key] = self._made(metric, labels)
        return self._series[key]

    def _made(self, metric: Metric, labels: dict[str, str]) -> Any:
        if metric.name not in self._families:
            kind = getattr(pb.MetricFamily, metric.kind.upper())
            self._families[metric.name] = pb.MetricFamily(
                name=metric.name, description=metric.meaning, kind=kind
            )
            _METRICS_FOR_EVER.append(self._families[metric.name])
        family, labels = self._families[metric.name], {"model": self._model, **labels}
        buckets = {"buckets": list(metric.buckets)} if metric.kind == "histogram" else {}
        series = family.Metric(labels=labels, **buckets)
        _METRICS_FOR_EVER.append(series)
        return series


def metrics_loop(model: str, publisher: str, publish: Publish, subject: Any) -> MetricsLoop:
    """Starts to publish the metrics of `subject`. `publisher`: conductor, prefill or decode."""
    return MetricsLoop(lambda: MetricPage(publisher, MetricSeries(model)), publish, subject)
