"""The command lines of Tritons: ports, polled repository, and the admin key for restricted APIs.

Some APIs of Triton are dangerous. A client that registers shared memory with Triton can read and
write the storage nodes' segments. Clients can unload models, and fill a disk with traces or logs.
These APIs therefore require the admin key. Health and inference are open to all clients. On the
frontend's Triton, metadata, configuration and statistics are open too.

Each launch makes a new key and keeps it in a file that only the operator can read. Triton accepts
the key only as an argument. The key therefore protects against the network, but not against users
who can list the processes of this host.

`stage` makes the folder for `--backend-directory`. It contains `python/` with copies of Triton's
Python backend (Triton rejects symbolic links), and a folder for each of our backends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Collection, Sequence
from pathlib import Path

from backends.cluster.host_plan import host_and_port
from backends.launch_secret import make_secret
from backends.launcher.environment import TritonInstall
from backends.launcher.triton_process import Endpoints
from backends.tracing.trace_context import TRACEPARENT
from backends.worker_tls import server_arguments
from mooncake_store.keys.folder import Keys

OUR_BACKENDS = ("preprocessing", "postprocessing", "conductor", "prefill", "decode")
FRONTEND_EXIT_S, WORKER_EXIT_S = 4, 5  # seconds that Triton waits for running requests at its exit
# From 2.73 on, Triton kills a model's process that takes longer to end. Closing a worker takes 30 s
# at most, and its process has more to close.
STUB_END_S_MAX = 60
RESTRICTED_APIS = ("shared-memory", "model-repository", "trace", "logging")
# A worker's Triton serves only readiness probes and the inference calls of frontends.
WORKER_RESTRICTED_APIS = (*RESTRICTED_APIS, "metadata", "model-config", "statistics")
HEADER = "mooncake-admin-key"


def open_api_problems(open_apis: Collection[str]) -> list[str]:
    known = ", ".join(RESTRICTED_APIS)
    return [
        f"--open-api {api}: use one of {known}" for api in open_apis if api not in RESTRICTED_APIS
    ]


class AdminKey:
    """The admin key of one launch, written to the file `path` for the operator."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key = make_secret()

    def write(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(self._key)

    def remove(self) -> None:
        """Remove the file, unless another launch has replaced it."""
        with contextlib.suppress(OSError):
            if self._path.read_text() == self._key:
                self._path.unlink()

    def for_clients(self, open_apis: Collection[str]) -> list[str]:
        """The arguments that restrict APIs of the frontend's Triton; [] if all APIs are open."""
        closed = [api for api in RESTRICTED_APIS if api not in open_apis]
        options = ("--http-restricted-api", "--grpc-restricted-protocol")
        return [f"{option}={self._rule(closed)}" for option in options if closed]

    def for_worker(self) -> list[str]:
        return [f"--grpc-restricted-protocol={self._rule(WORKER_RESTRICTED_APIS)}"]

    def _rule(self, apis: Sequence[str]) -> str:
        return f"{','.join(apis)}:{HEADER}={self._key}"


def common_arguments(
    server: Path, repository: Path, backends: Path, endpoints: Endpoints, shm_prefix: str
) -> list[str]:
    """The arguments of every Triton. `shm_prefix`: prefix of the names of its shared memory."""
    return [
        str(server),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        *listening("grpc", endpoints.grpc),
        *listening("metrics", endpoints.metrics),
        *(listening("http", endpoints.http) if endpoints.http else ["--allow-http=false"]),
        "--model-control-mode=poll",
        "--repository-poll-secs=1",
        "--exit-on-error=false",
        "--disable-auto-complete-config",
        "--strict-readiness=false",
        "--allow-gpu-metrics=false",
        *(
            f"--backend-config={name},{setting}"
            for name in ("python", *OUR_BACKENDS)
            for setting in (
                f"shm-region-prefix-name={shm_prefix}{name}",
                f"stub-timeout-seconds={STUB_END_S_MAX}",
            )
        ),
    ]


def frontend_arguments(
    admin_key: AdminKey, open_apis: Sequence[str], more: Sequence[str], is_traced: bool = False
) -> list[str]:
    """The further arguments of the frontend's Triton. `more`: arguments from the operator.

    With tracing, Triton copies the gRPC metadata `traceparent` to a request parameter of this name.
    Triton 2.51 also copies the HTTP header of this name, except for requests to /generate.
    """
    forwarded = [f"--grpc-header-forward-pattern=(?i){TRACEPARENT}"] if is_traced else []
    return [
        f"--exit-timeout-secs={FRONTEND_EXIT_S}",
        "--allow-cpu-metrics=true",
        *admin_key.for_clients(open_apis),
        *forwarded,
        *more,
    ]


def worker_arguments(admin_key: AdminKey, keys: Keys | None) -> list[str]:
    """The further arguments of a worker's Triton. Pings are not limited, because frontends
    (frontend/grpc_calls.py) send more pings than a gRPC server accepts by default."""
    return [
        f"--exit-timeout-secs={WORKER_EXIT_S}",
        "--allow-cpu-metrics=false",
        "--grpc-http2-max-ping-strikes=0",
        *admin_key.for_worker(),
        *server_arguments(keys),
    ]


def listening(service: str, address: str) -> list[str]:
    host, port = host_and_port(address)
    return [f"--{service}-address={host}", f"--{service}-port={port}"]


def stage(triton: TritonInstall, folder: Path) -> Path:
    """Replace the content of `folder` by Triton's Python backend and our backends."""
    if folder.exists():
        shutil.rmtree(folder)
    python = folder / "python"
    python.mkdir(parents=True)
    for source in triton.python_backend.iterdir():
        if source.suffix in (".so", ".py"):
            shutil.copyfile(source, python / source.name)
    stub = python / "triton_python_backend_stub"
    shutil.copyfile(triton.stub, stub)
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP)
    ours = Path(__file__).parents[1]
    for name in OUR_BACKENDS:
        (folder / name).mkdir()
        shutil.copyfile(ours / name / "model.py", folder / name / "model.py")
    return folder
