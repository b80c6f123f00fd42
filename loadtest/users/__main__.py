"""A load test in one command: `make loadtest`, or

    python -m loadtest.users --users 5 --seconds 60 [any option of Locust and ours]

It uses the server at --host, or else one at the default ports, or else one that it starts and stops
itself; with `--via openai` that is the server's gateway. Locust runs headless in a process of its
own. Ctrl-C is forwarded to Locust, and Locust's exit status is this command's.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.extras import require
from loadtest.client.openai_server import http_address
from loadtest.client.server import addresses_of
from loadtest.harness.server import (
    PROJECT,
    ServerFailed,
    gateway_is_ready,
    models_waiting,
    own_ports,
    serving,
    wait_for_gateway,
)
from loadtest.users.settings import OPENAI_VIAS, add_options, address, default_host

LOCUSTFILE = Path(__file__).parents[1] / "locustfile.py"
REPORT = PROJECT / ".mooncake" / "loadtest.html"
SPAWN_S = 2.0  # seconds after which all users have started


def parser_of(is_help: bool) -> argparse.ArgumentParser:
    """The parser for --help with the options of the load test, which are otherwise passed to
    Locust. Locust prints its own --help before it reads a locustfile, so it cannot show ours."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.users",
        description="Load a server with users for a while, and check its limits.",
        epilog="All other options are Locust's: `locust --help`.",
        add_help=is_help,
        allow_abbrev=False,
    )
    parser.add_argument("-u", "--users", type=int, default=5, help="Users at once (default: 5).")
    parser.add_argument("--seconds", type=int, default=60, help="How long (default: 60).")
    if is_help:
        add_options(parser)
    else:
        parser.add_argument("-H", "--host", "--url", default="")
        parser.add_argument("--via", "--protocol", default="grpc")
        parser.add_argument("--metrics-url", default="")
        parser.add_argument("--report", default=str(REPORT))
    return parser


@dataclass(frozen=True, slots=True)
class LoadTarget:
    host: str
    metrics_url: str


def target_of(host: str, via: str) -> LoadTarget:
    """ValueError for an invalid address."""
    if via in OPENAI_VIAS:
        gateway = http_address(host)
        return LoadTarget(gateway.url, gateway.metrics_url)
    server = address(host)
    named = f"http://{server.http}" if via == "http" else server.grpc
    return LoadTarget(named, server.metrics_url)


@contextlib.contextmanager
def target_at(host: str, via: str) -> Iterator[LoadTarget]:
    """The named server, the one at the default ports, or a server started here."""
    if host:
        yield target_of(host, via)
        return
    usual, is_gateway = default_host(via), via in OPENAI_VIAS
    if gateway_is_ready(usual) if is_gateway else not models_waiting(addresses_of(usual)):
        print(f"using the server at {usual}", flush=True)
        yield target_of(usual, via)
        return
    print(f"no server is ready at {usual}; starting one ...", flush=True)
    port = own_ports(1)[0] if is_gateway else 0
    with serving(None, ("--openai-port", str(port)) if port else ()) as addresses:
        own = f"127.0.0.1:{port}" if port else addresses.grpc
        if port:
            wait_for_gateway(own)
        print(f"the server is ready at {own}", flush=True)
        yield target_of(own, via)
        print("stopping the server ...", flush=True)


def locust_command(options: argparse.Namespace, target: LoadTarget, rest: list[str]) -> list[str]:
    given = {
        "--users": str(options.users),
        "--spawn-rate": f"{max(1.0, options.users / SPAWN_S):g}",
        "--run-time": f"{options.seconds}s",
        "--host": target.host,
        "--via": options.via,
        "--metrics-url": options.metrics_url or target.metrics_url,
        "--report": options.report,
    }
    locust = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary"]
    return [*locust, *(word for option in given.items() for word in option), *rest]


def run_to_end(command: Sequence[str]) -> int:
    """Run a command with our signals forwarded to it; returns its exit status. It has a session of
    its own, because Locust stops at once on a second Ctrl-C."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def pass_on(number: int, _: object) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        parser_of(is_help=True).parse_args(["--help"])
    require("locust", "the load test")
    options, rest = parser_of(is_help=False).parse_known_args(list(arguments))
    Path(options.report).parent.mkdir(parents=True, exist_ok=True)
    try:
        with target_at(options.host, options.via) as target:
            return run_to_end(locust_command(options, target, rest))
    except (ServerFailed, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before or after Locust
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
