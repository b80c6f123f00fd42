"""A load test in one command: `make loadtest`, or

    python -m loadtest.users --users 5 --seconds 60 [any option of Locust and ours]

Uses the server at --host, by default the one at the default ports if there is one, and otherwise
starts one and stops it at the end. Locust runs headless in a process of its own; Ctrl-C is passed
on to it, and it ends as it would have at the end of its time. Its exit status is this command's.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from backends.extras import require
from loadtest.client.server import Addresses, addresses_of
from loadtest.harness.server import PROJECT, ServerFailed, models_waiting, serving
from loadtest.users.settings import HOST, add_options, address

LOCUSTFILE = Path(__file__).parents[1] / "locustfile.py"
REPORT = PROJECT / ".mooncake" / "loadtest.html"
SPAWN_S = 2.0  # all users have come by then


def parser_of(is_help: bool) -> argparse.ArgumentParser:
    """For --help with the options of the load test, which are otherwise passed on to Locust.

    Locust prints its own --help before it reads a locustfile, so ours are not in there.
    """
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.users",
        description="Load a server with users for a while, and judge what came of it.",
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
        parser.add_argument("--protocol", default="grpc")
        parser.add_argument("--metrics-url", default="")
        parser.add_argument("--report", default=str(REPORT))
    return parser


@contextlib.contextmanager
def server_at(host: str) -> Iterator[Addresses]:
    """The server named, the one at the default ports, or one of our own."""
    if host:
        yield address(host)
        return
    usual = addresses_of(HOST)
    if not models_waiting(usual):
        print(f"using the server at {usual.grpc}", flush=True)
        yield usual
        return
    print(f"no server is ready at {usual.grpc}; starting one ...", flush=True)
    with serving(None) as addresses:
        print(f"it is ready at {addresses.grpc}", flush=True)
        yield addresses
        print("stopping it ...", flush=True)


def locust_command(options: argparse.Namespace, server: Addresses, rest: list[str]) -> list[str]:
    is_http = options.protocol == "http"
    return [
        sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary",
        "--users", str(options.users), "--spawn-rate", f"{max(1.0, options.users / SPAWN_S):g}",
        "--run-time", f"{options.seconds}s",
        "--host", f"http://{server.http}" if is_http else server.grpc,
        "--protocol", options.protocol,
        "--metrics-url", options.metrics_url or server.metrics_url,
        "--report", options.report, *rest,
    ]  # fmt: skip


def run_to_end(command: Sequence[str]) -> int:
    """The exit status of the command, which gets our signals in our place.

    It has a session of its own: a terminal sends Ctrl-C to every process in the foreground, and two
    would mean "at once" to Locust.
    """
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
        with server_at(options.host) as server:
            return run_to_end(locust_command(options, server, rest))
    except (ServerFailed, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before or after Locust
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
