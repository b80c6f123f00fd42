"""Triton entry point of a prefill worker.

Translation only: Triton requests in, Triton responses out. What a prefill worker does is in
backends/prefill_worker.py, which knows nothing of Triton.
"""

import msgspec

from backends import triton_io
from backends.worker_config import PrefillConfig, read_config
from backends.worker_protocol import PrefillRequest


class TritonPythonModel:
    def initialize(self, args):
        triton_io.start_logging()
        try:
            model, raw, count = triton_io.parameters(args)
            config = read_config(PrefillConfig, model, raw, count)
            # Not before: Triton tries a wrong config.pbtxt again every second.
            from backends import worker_metrics
            from backends.prefill_worker import PrefillWorker

            self.worker = PrefillWorker(model, config, triton_io.repository_of(args))
        except Exception as error:  # edge: the reason goes to the operator, without a traceback
            raise triton_io.load_error(error) from None
        self.parse = msgspec.msgpack.Decoder(PrefillRequest).decode
        self.metrics = triton_io.MetricsLoop(model, worker_metrics.prefill, self.worker)

    def execute(self, requests):
        for request in requests:
            reply = triton_io.WorkerReply(request)
            try:
                call = triton_io.worker_call(request, self.parse)
                if isinstance(call, triton_io.StopCall):
                    self.worker.stop(call.request_id)
                    reply.finish()
                else:
                    self.worker.submit(call.body, call.token_ids, reply)
            except Exception as error:  # edge: one bad request must not fail its neighbours
                reply.fail(error)
        return None  # decoupled: every answer leaves through its reply

    def finalize(self):
        self.worker.close(timeout_s=30.0)
        self.metrics.close()
