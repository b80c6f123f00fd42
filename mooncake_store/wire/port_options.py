"""Options for the ports of a process: the same for the directory and for storage nodes."""

from __future__ import annotations

import argparse
import os

from mooncake_store.keys.curve import INSECURE_VARIABLE
from mooncake_store.keys.folder import VARIABLE
from mooncake_store.process.metrics_page import LOOPBACK


def add_port_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics-port", type=int, default=0, help="HTTP port for Prometheus; 0: none (0)"
    )
    parser.add_argument(
        "--metrics-address", default=LOOPBACK, help="address of the HTTP port (%(default)s)"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help=f"listen on addresses that other hosts reach, even without keys ({VARIABLE})",
    )


def apply_insecure(options: argparse.Namespace) -> None:
    """With --insecure, let this process and the processes that it starts listen without keys."""
    if options.insecure:
        os.environ[INSECURE_VARIABLE] = "1"
