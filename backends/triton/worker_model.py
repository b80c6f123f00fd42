"""What the Triton models of prefill and decode workers share: initialize, execute, finalize.

Translation only: Triton requests in, Triton responses out. What a worker does is in
prefill_worker.py and decode_worker.py, which know nothing of Triton.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends.triton import triton_io
from backends.triton.worker_kinds import make_worker, read_worker_configs
from backends.workers.protocol import DecodeRequest, PrefillRequest

CLOSE_S_MAX = 30.0


class WorkerModel:
    """Base of TritonPythonModel in prefill/model.py and decode/model.py."""

    role: str  # "prefill" | "decode"

    def initialize(self, args: dict[str, str]) -> None:
        triton_io.start_logging()
        try:
            self._start(args)
        except Exception as error:  # edge: the reason goes to the operator, without a traceback
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
            except Exception as error:  # edge: one bad request must not fail its neighbours
                reply.fail(error)
        return None  # decoupled: every answer leaves through its reply

    def finalize(self) -> None:
        self._worker.close(CLOSE_S_MAX)
        self._metrics.close()

    def _start(self, args: dict[str, str]) -> None:
        model, raw, count = triton_io.parameters(args)
        is_prefill = self.role == "prefill"
        configs = read_worker_configs(self.role, model, raw, count)
        # Imported only now, because Triton tries a wrong config.pbtxt again every second.
        from backends.workers import metrics as worker_metrics

        config, *of_engine = configs
        publish = worker_metrics.prefill if is_prefill else worker_metrics.decode
        request_class = PrefillRequest if is_prefill else DecodeRequest
        self._parse = msgspec.msgpack.Decoder(request_class).decode
        repository = triton_io.repository_of(args)
        self._worker = make_worker(self.role, model, repository, config, *of_engine)
        self._metrics = triton_io.metrics_loop(model, self.role, publish, self._worker)
