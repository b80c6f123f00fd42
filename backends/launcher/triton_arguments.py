"""The command lines of Tritons: ports, polled repository, restricted APIs.

`stage` makes the folder for `--backend-directory`. Triton requires `python/` in it with real copies
of its Python backend (it rejects symbolic links), and one folder for each of our backends.

Not here: which Tritons there are and when they start (launch.py, triton_process.py).
"""

from __future__ import annotations

import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from backends.cluster.host_plan import host_and_port
from backends.launcher.admin_key import AdminKey
from backends.launcher.environment import TritonInstall
from backends.launcher.triton_process import Endpoints
from backends.tracing.trace_context import TRACEPARENT
from backends.worker_tls import server_arguments
from mooncake_store.keys.folder import Keys

OUR_BACKENDS = ("preprocessing", "postprocessing", "conductor", "prefill", "decode")
FRONTEND_EXIT_S, WORKER_EXIT_S = 4, 5  # limit of Triton's wait for requests and models


def common_arguments(
    server: Path, repository: Path, backends: Path, endpoints: Endpoints, shm_prefix: str
) -> list[str]:
    """The arguments of every Triton. `shm_prefix` is the prefix of its shared memory names."""
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
            f"--backend-config={name},shm-region-prefix-name={shm_prefix}{name}"
            for name in ("python", *OUR_BACKENDS)
        ),
    ]


def frontend_arguments(
    admin_key: AdminKey, open_apis: Sequence[str], more: Sequence[str], is_traced: bool = False
) -> list[str]:
    """The further arguments of the frontend's Triton; `more` comes from the operator.

    With tracing, Triton copies the gRPC metadata `traceparent` to a request parameter of this name.
    Triton 2.51 also copies HTTP headers, except those of /generate.
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
    """The further arguments of a worker's Triton. Frontends of other hosts ping a worker
    (frontend/grpc_calls.py) more often than a gRPC server accepts by default."""
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
    """Fill `folder` with Triton's Python backend and our backends; returns `folder`."""
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
