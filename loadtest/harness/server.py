"""A server for a benchmark: a running one by its address, or `mooncake serve` started for it.

A server of our own gets free ports, its own session and a log file. It is ready when every model of
its repository is ready. It is stopped by SIGINT to its process id and awaited: no process is ever
ended by name. It may serve a copy of the model repository with other parameters.

Not here: what a server consists of (backends/launcher/launch.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.direct_http import CALL_FAILED, DIRECTLY
from backends.launcher.environment import free_ports
from backends.shipped import shipped_repository
from loadtest.client.server import Addresses, addresses_of

SOURCE = Path(__file__).resolve().parents[2]
# The checkout; for an installed wheel the current folder.
PROJECT = SOURCE if (SOURCE / "pyproject.toml").is_file() else Path.cwd()
READY_S_MAX = 300.0
STOP_S_MAX = 45.0
POLL_S = 0.2
PROBE_S_MAX, GATEWAY_S_MAX = 5.0, 60.0
PORT_MIN, PORT_MAX = 20_000, 32_000
LOG_LINES_SHOWN = 20
_chosen_ports: set[int] = set()

Parameters = Mapping[str, str | int | float]
# Limits of a measurement: `auto` depends on the machine that it runs on.
FIXED_LIMITS: Parameters = {"ttft_slo_s": "30", "tbt_slo_s": "1.0"}


class CannotMeasure(Exception):
    """A measurement needs something that is missing; the message has the remedy."""


class ServerFailed(CannotMeasure):
    """The server did not become ready; the message ends with its last log lines."""


@dataclass(frozen=True, slots=True)
class OwnServer:
    addresses: Addresses
    pid: int  # of the launcher


@contextlib.contextmanager
def serving(url: str | None, arguments: Sequence[str] = ()) -> Iterator[Addresses]:
    """The server at `url`, or one of our own (started with `arguments`) until the block ends."""
    if url is None:
        with started(arguments) as server:
            yield server.addresses
    else:
        addresses = addresses_of(url)
        wait_ready(addresses, READY_S_MAX)
        yield addresses


@contextlib.contextmanager
def started(arguments: Sequence[str] = ()) -> Iterator[OwnServer]:
    addresses = free_addresses()
    with tempfile.NamedTemporaryFile(prefix="mooncake-bench-", suffix=".log") as log:
        process = start(addresses, arguments, Path(log.name))
        try:
            wait_ready(addresses, READY_S_MAX, process, Path(log.name))
            yield OwnServer(addresses, process.pid)
        finally:
            stop(process)


def own_ports(count: int) -> list[int]:
    """Free ports that this process has not chosen before, for a server that will listen only after
    others were chosen. They are below the kernel's ephemeral range, where any outgoing connection
    could take one of them before the server listens. They are above the ports that a launcher
    chooses for its own Tritons."""
    ports = free_ports(count, _chosen_ports, PORT_MIN, PORT_MAX)
    _chosen_ports.update(ports)
    return ports


def free_addresses() -> Addresses:
    return Addresses(*(f"127.0.0.1:{port}" for port in own_ports(3)))


def start(
    addresses: Addresses, arguments: Sequence[str], log_path: Path
) -> subprocess.Popen[bytes]:
    ports = []
    for name in ("http", "grpc", "metrics"):
        ports += [f"--{name}-port", getattr(addresses, name).rpartition(":")[2]]
    command = [sys.executable, "-m", "backends.cli", "serve", *ports]
    command += ["--model-repository", str(shipped_repository()), *arguments]
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=PROJECT,  # holds its state folder
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )


def wait_ready(
    addresses: Addresses,
    ready_s_max: float,
    process: subprocess.Popen[bytes] | None = None,
    log_path: Path | None = None,
) -> None:
    """Wait until every model is ready; ServerFailed when the process ends or the time is up."""
    give_up_s = time.monotonic() + ready_s_max
    while True:
        waiting = models_waiting(addresses)
        if not waiting:
            return
        if process is not None and process.poll() is not None:
            what = f"`mooncake serve` ended with status {process.returncode}"
            raise ServerFailed(f"{what}\n{last_lines(log_path)}")
        if process is None or time.monotonic() > give_up_s:
            what = f"{addresses.http} is not ready: {', '.join(waiting)}"
            raise ServerFailed(f"{what}\n{last_lines(log_path)}".rstrip())
        time.sleep(POLL_S)


def models_waiting(addresses: Addresses) -> list[str]:
    """The models that are not ready; empty when every model of the repository is."""
    states = model_states(addresses)
    if isinstance(states, str):
        return [states]
    names = [name for name, is_ready in states.items() if not is_ready]
    return names if states else ["no model is known yet"]


def model_states(addresses: Addresses, timeout_s: float = 10.0) -> dict[str, bool] | str:
    """Whether each model is ready, from the metrics port; or why that gives no answer."""
    try:
        with DIRECTLY.open(f"http://{addresses.metrics}/ready", timeout=timeout_s) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:  # 503: some models are not ready
        text = error.read()
    except OSError as error:
        return f"no answer ({error})"
    try:
        return {model["name"]: model["is_ready"] for model in json.loads(text)["models"]}
    except (ValueError, KeyError, TypeError):
        return "the server there is no `mooncake serve`"


def gateway_is_ready(gateway: str) -> bool:
    """Whether the gateway serves its models, with or without API keys."""
    try:
        with DIRECTLY.open(f"http://{gateway}/ready", timeout=PROBE_S_MAX) as answer:
            return bool(answer.status == 200)
    except CALL_FAILED:
        return False


def wait_for_gateway(gateway: str) -> None:
    """ServerFailed when the gateway does not become ready."""
    give_up_s = time.monotonic() + GATEWAY_S_MAX
    while not gateway_is_ready(gateway):
        if time.monotonic() > give_up_s:
            raise ServerFailed(f"the gateway at {gateway} is not ready; is `.[gateway]` installed?")
        time.sleep(POLL_S)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt, wait, and kill only then; the server's own children end with it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S_MAX)


def last_lines(log_path: Path | None) -> str:
    if log_path is None or not log_path.exists():
        return ""
    return "\n".join(log_path.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])


@contextlib.contextmanager
def own_repository(without: tuple[str, ...], models: Mapping[str, Parameters]) -> Iterator[Path]:
    """A changed copy of the model repository until the block ends, without some models. Its limits
    are FIXED_LIMITS unless `models` has others."""
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder:
        repository = Path(folder) / "model_repository"
        ignored = shutil.ignore_patterns(*without)
        shutil.copytree(shipped_repository(), repository, ignore=ignored)
        set_parameters(repository, "conductor", FIXED_LIMITS)
        for model, values in models.items():
            set_parameters(repository, model, values)
        yield repository


def set_parameters(repository: Path, model: str, values: Parameters) -> None:
    """Write parameters into a model's config.pbtxt atomically; a running server reloads them."""
    path = repository / model / "config.pbtxt"
    text = path.read_text()
    for name, value in values.items():
        line = f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
        pattern = rf'^parameters {{ key: "{name}" value {{ string_value: "[^"]*" }} }}$'
        text, count = re.subn(pattern, line, text, flags=re.MULTILINE)
        if not count:
            text = f"{text.rstrip()}\n{line}\n"
    partial = path.with_suffix(".new")  # a server never reads half a file
    partial.write_text(text)
    partial.replace(path)
