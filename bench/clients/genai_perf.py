"""NVIDIA genai-perf over KServe gRPC, as for TensorRT-LLM's ensemble and as for vLLM's backend.

genai-perf makes the requests and the table; `perf_analyzer` sends. Its wheel on PyPI is empty; the
real binary came with `tritonclient` up to 2.60 (2.51 is the last for the glibc of Debian 12). It
needs two libraries of nvidia-pytriton, which it gets by links.

Not here: installing (environment.py).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import secrets
import subprocess
from pathlib import Path

from bench.clients.agreement import ClientLoad, ClientReport
from bench.clients.environment import ClientFailed, flags, run_client

NAME = "genai-perf"
REQUIREMENTS = ("genai-perf==0.0.16", "tritonclient==2.51.0")
BACKENDS = ("tensorrtllm", "vllm")
PROBE_S_MAX = 30.0
EXPORT = "*/profile_export_genai_perf.json"
TABLE_TITLE = "NVIDIA GenAI-Perf | LLM Metrics"
# name that perf_analyzer loads -> its name in nvidia-pytriton
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


def lend_libraries(binaries: Path) -> dict[str, str]:
    """Variables with which perf_analyzer starts; raises ClientFailed when it does not."""
    lent = binaries.parent / "lent_libraries"
    lent.mkdir(exist_ok=True)
    for wanted, pattern in LIBRARIES.items():
        for found in bundled_libraries().glob(pattern):
            (lent / wanted).unlink(missing_ok=True)
            (lent / wanted).symlink_to(found)
    path = os.pathsep.join(filter(None, (str(lent), os.environ.get("LD_LIBRARY_PATH"))))
    variables = {"LD_LIBRARY_PATH": path}
    program = str(binaries / "perf_analyzer")
    try:
        done = subprocess.run(
            [program, "--version"],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=PROBE_S_MAX,
            check=False,
        )
    except OSError as error:
        raise ClientFailed(f"{program} does not start: {error}") from error
    if done.returncode:
        raise ClientFailed(
            f"perf_analyzer does not start: {done.stderr.strip()}\nIt needs libb64.so.0d (Debian, "
            "Ubuntu: apt-get install libb64-0d) and libcudart.so.12 (pip install "
            "nvidia-cuda-runtime-cu12, then its lib folder in LD_LIBRARY_PATH), or nvidia-pytriton "
            "in the project's environment, which has both"
        )
    return variables


def bundled_libraries() -> Path:
    """The folder of shared libraries of nvidia-pytriton; may not exist."""
    try:
        distribution = importlib.metadata.distribution("nvidia-pytriton")
    except importlib.metadata.PackageNotFoundError:
        return Path("nvidia_pytriton.libs")
    return Path(str(distribution.locate_file("nvidia_pytriton.libs")))


def arguments(load: ClientLoad, model: str, backend: str, folder: Path) -> list[str]:
    return [
        *("profile", "--streaming", "--output-tokens-mean-deterministic"),
        *flags(model=model, endpoint_type="kserve", backend=backend, url=load.addresses.grpc),
        *flags(tokenizer=load.tokenizer, num_prompts=load.requests, request_count=load.requests),
        *flags(isl=load.input_tokens, osl=load.output_tokens, concurrency=load.concurrency),
        # Its default seed is 0: the prompts of the run before would be in the server's cache.
        *flags(random_seed=secrets.randbits(31), artifact_dir=folder),
    ]


def run(binaries: Path, load: ClientLoad, model: str, backend: str, folder: Path) -> ClientReport:
    """One run, its files in `folder`; raises ClientFailed."""
    folder.mkdir(parents=True)
    variables = lend_libraries(binaries)
    variables["PATH"] = os.pathsep.join((str(binaries), os.environ["PATH"]))
    command = [str(binaries / NAME), *arguments(load, model, backend, folder)]
    said = run_client(command, folder, variables)
    return read_report(folder, model, backend, said)


def read_report(folder: Path, model: str, backend: str, said: str) -> ClientReport:
    """genai-perf's own export, and its table as it printed it."""
    exports = list(folder.glob(EXPORT))
    if len(exports) != 1:
        raise ClientFailed(f"genai-perf wrote {len(exports)} reports into {folder}; expected one")
    _, title, table = said.partition(TABLE_TITLE)
    table, _, _ = table.partition("\n[")
    found = json.loads(exports[0].read_text())
    return ClientReport.of_export(NAME, model, backend, found, f"{title}\n{table.strip()}")
