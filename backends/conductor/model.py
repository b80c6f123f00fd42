"""Triton Python model `conductor`, which clients call. The model passes requests to the Frontend,
which serves them and routes them with the Conductor."""

import os
import time
import uuid

from backends.config_pbtxt import FrontendConfig, checkpoint_folder, path_beside, read_configs
from backends.frontend import metrics
from backends.frontend.cluster_view import ClusterView
from backends.frontend.frontend import Frontend
from backends.frontend.grpc_calls import GrpcCalls
from backends.frontend.token_streams import TokenStreams, messages_per_s_affordable
from backends.frontend.traffic_recorder import TrafficRecorder
from backends.launcher.launch_files import STOPPING
from backends.tenants.api_keys import ApiKeys
from backends.text.tokenizer import Tokenizer
from backends.tracing.export import Tracing
from backends.triton import triton_io
from backends.workers.protocol import inbox_address, open_outbox
from conductor.config import ConductorConfig

# Longest wait until one prefill and one decode worker have registered: engines load weights, and
# compile. After this time the model becomes READY without them, and rejects requests until both
# have registered.
PAIR_WAIT_S = 1800.0


class TritonPythonModel:
    def initialize(self, args):
        started_at_s = time.time()
        triton_io.start_logging()
        try:
            model, raw, count = triton_io.parameters(args)
            config, deciding = read_configs((FrontendConfig, ConductorConfig), model, raw, count)
            repository = triton_io.repository_of(args)
            tokenizer = Tokenizer.load(checkpoint_folder(config.checkpoint, repository))
            keys, tracing = ApiKeys.of_process(), Tracing.of_environment()
            recorder = None
            if config.recording_folder:
                recording = path_beside(config.recording_folder, repository)
                recorder = TrafficRecorder(recording, config.recording_bytes_max)
            self.outbox = open_outbox()
            self.cluster = ClusterView(
                deciding, os.environ["MOONCAKE_DIRECTORY"], os.environ["MOONCAKE_EVENTS"]
            )
        except Exception as error:  # Triton logs only the message of load_error's exception
            raise triton_io.load_error(error) from None
        self.calls = GrpcCalls()
        self.streams = TokenStreams(
            inbox_address(f"{model}-{uuid.uuid4().hex[:12]}"),
            config.messages_per_s_max or messages_per_s_affordable(),
        )
        self.frontend = Frontend(
            config,
            tokenizer,
            self.cluster,
            self.calls,
            self.streams,
            self.outbox,
            recorder,
            keys,
            tracing,
        )
        self.store = metrics.StoreWatch(self.cluster.client)
        shown = metrics.Shown(self.frontend, self.store, started_at_s)
        self.metrics = triton_io.metrics_loop(model, "conductor", metrics.show, shown)
        # Workers load in other Tritons, so they may register later. The launcher ends this wait by
        # the file STOPPING, which exists while the launch stops.
        stopping = os.path.join(os.environ["MOONCAKE_SOCKETS"], STOPPING)
        self.cluster.wait_for_a_pair(PAIR_WAIT_S, lambda: os.path.exists(stopping))

    def execute(self, requests):
        for request in requests:
            reply = triton_io.Reply(request)
            try:
                self.frontend.submit(
                    triton_io.inputs_of(request), triton_io.parameters_of(request), reply
                )
            except Exception as error:  # a failure of one request must not fail the others
                reply.fail(error)
        return None  # decoupled: each reply sends its own responses

    def finalize(self):
        self.frontend.close(timeout_s=30.0)
        self.metrics.close()
        self.store.close()
        self.cluster.close()
        self.outbox.close()
        self.calls.close()
        self.streams.close()
