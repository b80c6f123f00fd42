"""The common Triton model of prefill and decode workers: initialize, execute, finalize.

The workers themselves (workers/prefill_worker.py, decode_worker.py) do not depend on Triton.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends.metrics.page import MetricPage
from backends.triton import triton_io
from backends.triton.metrics_loop import MetricsLoop
from backends.triton.worker_kinds import make_flipping_worker, make_worker, read_worker_configs
from backends.workers.protocol import DecodeRequest, PrefillRequest

CLOSE_S_MAX = 30.0  # time for running requests to finish when the model is unloaded


class WorkerModel:
    """Base of TritonPythonModel in prefill/model.py and decode/model.py."""

    role: str  # "prefill" | "decode"

    def initialize(self, args: dict[str, str]) -> None:
        triton_io.start_logging()
        try:
            self._start(args)
        except Exception as error:  # Catch all: Triton logs the message without a traceback
            raise triton_io.load_error(error) from None

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            reply = triton_io.WorkerReply(request)
            try:
                call = triton_io.worker_call(request, self._parse)
                if isinstance(call, triton_io.StopCall):
                    self._worker.stop(call.request_id)
                    reply.finish()
                else:
                    self._worker.submit(call.body, call.token_ids, reply)
            except Exception as error:  # Catch all: one bad request must not fail others
                reply.fail(error)
        return None  # Triton's decoupled mode: each reply sends its own responses

    def finalize(self) -> None:
        self._worker.close(CLOSE_S_MAX)
        self._metrics.close()

    def _start(self, args: dict[str, str]) -> None:
        model, raw, count = triton_io.parameters(args)
        configs = read_worker_configs(self.role, model, raw, count)
        self._model, self._series = model, triton_io.MetricSeries(model)
        repository, has_both = triton_io.repository_of(args), configs[0].roles == "both"
        own_class = PrefillRequest if self.role == "prefill" else DecodeRequest
        accepted: Any = PrefillRequest | DecodeRequest if has_both else own_class
        self._parse = msgspec.msgpack.Decoder(accepted).decode
        if not has_both:
            self._worker: Any = make_worker(self.role, model, repository, *configs)
            self._metrics = self._metrics_of(self._worker)
            return
        self._worker = make_flipping_worker(self.role, model, repository, *configs)
        self._metrics = self._metrics_of(self._worker.active)
        self._worker.on_change = self._changed

    def _changed(self, worker: Any) -> None:
        """Publish the metrics of `worker`, which has a new role."""
        self._metrics.close()
        self._metrics = self._metrics_of(worker, self._metrics.page)

    def _metrics_of(self, worker: Any, before: MetricPage | None = None) -> MetricsLoop:
        """`before`: the page of the earlier role, whose counters in `LASTING` continue."""
        # Imported after the configs were read, as in worker_kinds.py.
        from backends.workers import metrics as worker_metrics

        role = worker.process.info.role
        publish = worker_metrics.prefill if role == "prefill" else worker_metrics.decode

        def made() -> MetricPage:
            page = MetricPage(role, self._series)
            if before is not None:
                page.go_on_from(before, worker_metrics.LASTING)
            return page

        return MetricsLoop(made, publish, worker)
