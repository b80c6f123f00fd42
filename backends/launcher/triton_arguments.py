"""The command lines of Triton: what each of its servers listens for, polls, and keeps closed.

Triton wants `<backend-directory>/python/` with real copies of its Python backend (a symbolic link
is refused) and one folder per backend of ours beside it: `stage` makes that folder.

Not here: which Tritons there are and when they start (launch.py, triton_process.py).
"""

from __future__ import annotations

import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from backends.launcher.admin_key import AdminKey
from backends.launcher.environment import TritonInstall
from backends.launcher.triton_process import Endpoints
from backends.tracing.trace_context import TRACEPARENT
from backends.worker_tls import server_arguments
from mooncake_store.keys.folder import Keys

OUR_BACKENDS = ("preprocessing", "postprocessing", "conductor", "prefill", "decode")
FRONTEND_EXIT_S, WORKER_EXIT_S = 4, 5  # that a Triton waits for requests and models to end


def common_arguments(
    server: Path, repository: Path, backends: Path, endpoints: Endpoints, shm_prefix: str
) -> list[str]:
    """Of every Triton of ours. `shm_prefix`: what the names of its shared memory begin with."""
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
    """Of the Triton that clients call; `more` is the operator's own. A gRPC client's
    metadata `traceparent` become the request parameter of this name, where somebody traces. (Triton
    2.51 does so with headers of HTTP as well, but not with those of /generate.)"""
    forwarded = [f"--grpc-header-forward-pattern=(?i){TRACEPARENT}"] if is_traced else []
    return [
        f"--exit-timeout-secs={FRONTEND_EXIT_S}",
        "--allow-cpu-metrics=true",
        *admin_key.for_clients(open_apis),
        *forwarded,
        *more,
    ]


def worker_arguments(admin_key: AdminKey, keys: Keys | None) -> list[str]:
    """Of a worker's Triton. Frontends of other hosts ping it (frontend/grpc_calls.py), more often
    than gRPC's servers take by themselves."""
    return [
        f"--exit-timeout-secs={WORKER_EXIT_S}",
        "--allow-cpu-metrics=false",
        "--grpc-http2-max-ping-strikes=0",
        *admin_key.for_worker(),
        *server_arguments(keys),
    ]


def listening(service: str, address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    return [f"--{service}-address={host}", f"--{service}-port={port}"]


def stage(triton: TritonInstall, folder: Path) -> Path:
    """Fill `folder` with the Python backend and ours; returns it, for --backend-directory."""
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
