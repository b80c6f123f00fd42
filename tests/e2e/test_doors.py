"""Who may do what: clients ask for answers; workers, and Triton's other APIs, are not for them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc

from backends import launch_secret
from backends.frontend.grpc_calls import GrpcCalls
from backends.tensors import string_tensor
from backends.workers.protocol import REPLY_BODY, REPLY_IDS, REQUEST_BODY, REQUEST_IDS
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.records.membership import WorkerInfo
from tests.e2e.server import Server
from tests.e2e.server_processes import processes

HEADER = "mooncake-admin-key"


def admin_key(server: Server) -> str:
    port = server.addresses.http.rpartition(":")[2]
    path = server.state_dir / f"admin-key-{port}"
    assert path.stat().st_mode & 0o777 == 0o600
    return path.read_text()


def segment_of(server: Server, node: str) -> str:
    (name,) = [
        path.name for path in Path("/dev/shm").glob(f"mooncake-{server.process.pid}-*-{node}")
    ]
    return name


def test_no_client_registers_a_storage_node_s_memory(demo: Server) -> None:
    body = {"key": f"/{segment_of(demo, 's0')}", "offset": 0, "byte_size": 4096}
    path = "/v2/systemsharedmemory/region/stolen/register"
    status, said = demo.post(path, body)
    assert status in (401, 403), (status, said)
    status, said = demo.post(path, body, headers={HEADER: "wrong"})
    assert status in (401, 403), (status, said)
    key = {HEADER: admin_key(demo)}
    status, said = demo.post(path, body, headers=key)
    assert status == 200, (status, said)
    status, said = demo.post("/v2/systemsharedmemory/region/stolen/unregister", {}, headers=key)
    assert status == 200, (status, said)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/repository/index", {}),
        ("/v2/repository/models/conductor/unload", {}),
        ("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
        ("/v2/logging", {"log_verbose_level": 9}),
    ],
)
def test_what_only_an_operator_needs_is_closed(demo: Server, path: str, body: Any) -> None:
    status, said = demo.post(path, body)
    assert status in (401, 403), (status, said)


def test_the_same_is_closed_over_grpc_and_the_rest_is_open(demo: Server) -> None:
    with triton.InferenceServerClient(demo.addresses.grpc) as client:
        for closed in (
            client.get_model_repository_index,
            client.get_system_shared_memory_status,
            client.get_trace_settings,
            client.get_log_settings,
        ):
            with pytest.raises(triton.InferenceServerException, match="restricted"):
                closed()
        index = client.get_model_repository_index(
            headers={f"triton-grpc-protocol-{HEADER}": admin_key(demo)}
        )
        assert {model.name for model in index.models} == {
            "conductor",
            "ensemble",
            "preprocessing",
            "postprocessing",
        }
        assert client.is_server_ready() and client.is_model_ready("conductor")
        assert client.get_model_metadata("conductor").name == "conductor"
        assert client.get_model_config("conductor").config.backend == "conductor"
        assert client.get_inference_statistics("conductor").model_stats


def test_the_public_ports_know_no_worker(demo: Server) -> None:
    with triton.InferenceServerClient(demo.addresses.grpc) as client:
        for worker in ("prefill_0", "decode_0"):
            assert not client.is_model_ready(worker)


def workers(server: Server) -> Sequence[WorkerInfo]:
    logs = server.state_dir / f"logs-{server.addresses.http.rpartition(':')[2]}"
    (address,) = re.findall(r"ready address=(\S+)", (logs / "directory.log").read_text())
    with DirectoryClient(address) as client:
        return client.workers()


@pytest.mark.parametrize("secret", ["", "0" * 32])
def test_workers_answer_to_their_own_frontend_only(
    demo: Server, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(launch_secret.SECRET_VARIABLE, secret)
    calls = GrpcCalls()
    infos = workers(demo)
    assert {info.worker_id for info in infos} == {"prefill_0", "prefill_1", "decode_0", "decode_1"}
    assert len({info.grpc_address for info in infos}) == 4
    for info in infos:
        inputs = {REQUEST_IDS: np.array([1, 2], np.int32), REQUEST_BODY: string_tensor(b"\x80")}
        (answer,) = list(
            calls(info.grpc_address, info.worker_id, inputs, [REPLY_IDS, REPLY_BODY], "stranger")
        )
        said = b"different secrets" if secret else b"their own frontend"
        assert said in answer[REPLY_BODY][0]
    calls.close()


def test_a_worker_s_triton_has_no_other_door(demo: Server) -> None:
    for info in workers(demo):
        with grpc.insecure_channel(info.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for call, request in (
                (stub.RepositoryIndex, service_pb2.RepositoryIndexRequest()),
                (stub.ModelConfig, service_pb2.ModelConfigRequest(name=info.worker_id)),
                (stub.SystemSharedMemoryStatus, service_pb2.SystemSharedMemoryStatusRequest()),
            ):
                with pytest.raises(grpc.RpcError, match="restricted"):
                    call(request, timeout=10.0)
        host, _, port = info.grpc_address.rpartition(":")
        assert host == "127.0.0.1" and port


def test_the_secret_of_the_launch_is_in_no_argument_and_no_log(demo: Server) -> None:
    family = processes(demo)
    secrets = set()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            secrets.add(process.environ().get(launch_secret.SECRET_VARIABLE, ""))
    assert len(secrets) == 1
    (secret,) = secrets
    assert len(secret) >= 32
    assert not [p for p, arguments in family.items() if any(secret in each for each in arguments)]
    assert secret not in demo.triton_log() + demo.log.read_text()


def test_nothing_of_one_machine_listens_beyond_the_loopback(demo: Server) -> None:
    """UCX's ports among them: they know no keys."""
    listening = set()
    for process in processes(demo):
        with contextlib.suppress(psutil.NoSuchProcess):
            listening |= {
                (Path(process.exe()).name, connection.laddr.ip.removeprefix("::ffff:"))
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
    assert listening
    assert {address for _, address in listening} <= {"127.0.0.1", "::1"}, listening
