"""`mooncake serve`: parses its options, then starts, watches and ends a launch.

Not here: what serving consists of (launch.py).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from backends.launcher.environment import EnvironmentProblem
from backends.launcher.launch import (
    Launcher,
    ServeOptions,
    Stopped,
    ignore_signals,
    signals_as_exceptions,
)
from backends.launcher.processes import ChildDied
from mooncake_store.cli.arguments import parse_bytes

console = Console(stderr=True, highlight=False)


def serve(
    model_repository: Annotated[
        Path, typer.Option(help="Folder of Triton models; edit its config.pbtxt files freely.")
    ] = Path("model_repository"),
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="KServe HTTP port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="KServe gRPC port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Prometheus port.")] = 8002,
    metrics_address: Annotated[
        str, typer.Option(help="Address of that port; others than this host need another one.")
    ] = "127.0.0.1",
    nodes: Annotated[str, typer.Option(help="Storage nodes, comma separated.")] = "s0,s1",
    store_bytes: Annotated[
        str, typer.Option(help="Memory of each storage node in /dev/shm, like 512M or 4G.")
    ] = "1G",
    ssd_bytes: Annotated[
        str, typer.Option(help="SSD of each storage node for cold blocks, like 20G; 0: none.")
    ] = "0",
    ssd_path: Annotated[
        Path | None, typer.Option(help="Folder on that SSD (default: ssd in --state-dir).")
    ] = None,
    state_dir: Annotated[
        Path, typer.Option(help="Logs, staged backends and this machine's measured speeds.")
    ] = Path(".mooncake"),
    ready_s_max: Annotated[float, typer.Option(help="Give up when not ready after this.")] = 300.0,
    self_check: Annotated[
        bool, typer.Option(help="Every process proves its invariants each second, or ends.")
    ] = False,
    open_api: Annotated[
        list[str] | None,
        typer.Option(
            help="An API of Triton that needs no admin key: shared-memory, model-repository, "
            "trace or logging; repeatable."
        ),
    ] = None,
    triton_arg: Annotated[
        list[str] | None,
        typer.Option(help="Passed as it is to the tritonserver that clients call; repeatable."),
    ] = None,
) -> None:
    """Start directory, storage nodes and Tritons on this machine, until Ctrl-C."""
    sys.exit(serve_until_stopped(ServeOptions(
        model_repository=model_repository, address=address, http_port=http_port,
        grpc_port=grpc_port, metrics_port=metrics_port, metrics_address=metrics_address,
        nodes=tuple(filter(None, nodes.split(","))), store_bytes=parse_bytes(store_bytes),
        ssd_bytes=parse_bytes(ssd_bytes), ssd_path=ssd_path,
        state_dir=state_dir, ready_s_max=ready_s_max, is_self_checked=self_check,
        open_apis=tuple(open_api or ()), triton_args=tuple(triton_arg or ()),
    )))  # fmt: skip


def serve_until_stopped(options: ServeOptions) -> int:
    """The exit status."""
    launcher = Launcher(options)
    status = 0
    with signals_as_exceptions():
        try:
            run_until_stopped(launcher)
        except Stopped as stopped:
            console.print(f"{stopped}: stopping ...")
        except (EnvironmentProblem, ChildDied) as problem:
            ignore_signals()  # an impatient Ctrl-C may cut neither the reason nor the clean-up
            said = escape(str(problem))
            console.print(f"[bold red]cannot serve[/]: {said}", markup=True, soft_wrap=True)
            status = 1
        finally:
            ignore_signals()
            launcher.stop()
    return status


def run_until_stopped(launcher: Launcher) -> None:
    """Start, say how to send a request, then watch; returns only by an exception."""
    started_s = time.monotonic()
    with console.status("starting directory, storage nodes and Tritons ..."):
        launcher.start()
    with console.status(f"loading models (logs: {launcher.log_dir}) ..."):
        states = launcher.wait_ready()
    seconds = time.monotonic() - started_s
    console.print(f"ready after {seconds:.1f} s: {', '.join(state.name for state in states)}")
    console.print("try:", style="bold")
    console.print(
        f"  curl -sN {launcher.http_url}/v2/models/conductor/generate_stream -d "
        '\'{"text_input": "It is a truth", "max_tokens": 32, "stream": true}\'',
        soft_wrap=True,
    )
    launcher.news()  # what was logged before we were ready is not news
    while True:
        for restart in launcher.supervise():
            when = f" in {restart.pause_s:.0f} s" if restart.pause_s else ""
            console.print(f"[bold yellow]{escape(restart.name)} died, starting it again{when}[/]")
        for load in launcher.news():
            if load.reason:
                console.print(f"[bold yellow]kept the old settings of {escape(load.model)}[/]:")
                console.print(load.reason, markup=False, soft_wrap=True)
            else:
                console.print(f"{load.model} serves with the settings in its config.pbtxt")
        time.sleep(0.3)
