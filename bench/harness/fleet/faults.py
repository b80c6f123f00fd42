"""One fault in a network of hosts, until it is undone.

nftables drops packets where they arrive, never where they are sent: a rule for outgoing packets
makes `send` fail, while a broken switch goes unnoticed by the sender. Each fault is a table of its
own, so several may be active at once and each is undone alone.

Not here: the network itself, and the hosts of a fault (namespaces.py).
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Sequence

from loadtest.harness.server import CannotMeasure

_NUMBERS = itertools.count(1)
# Before connection tracking, which would accept packets of established connections.
_CHAIN = "type filter hook input priority raw; policy accept;"
BURST_BYTES, QUEUED_S = 65_536, 0.1


class NamespaceFailed(CannotMeasure):
    """A command that makes or changes the network failed; the message is its output."""


def run_tool(*words: str, text: str | None = None) -> str:
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NamespaceFailed(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


class NetworkFault:
    """Active from its construction until `undo`, or the end of the block.

    Commands are without their `ip netns exec NAMESPACE`, each with its namespace.
    """

    def __init__(
        self, name: str, make: Sequence[tuple[str, str]], unmake: Sequence[tuple[str, str]]
    ) -> None:
        self.name = name
        self._unmake = list(unmake)
        try:
            for namespace, words in make:
                run_tool("ip", "netns", "exec", namespace, *words.split())
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Undo the fault. A second call is harmless, and so is a removed network."""
        unmake, self._unmake = self._unmake, []
        for namespace, words in unmake:
            with contextlib.suppress(NamespaceFailed):
                run_tool("ip", "netns", "exec", namespace, *words.split())

    def __enter__(self) -> NetworkFault:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def dropped(name: str, rules: Sequence[tuple[str, str]]) -> NetworkFault:
    """`rules`: for each namespace the arriving packets to drop, in nft's syntax."""
    table = f"inet mooncake_fault_{next(_NUMBERS)}"
    make = []
    for namespace in dict.fromkeys(namespace for namespace, _ in rules):
        make.append((namespace, f"nft add table {table}"))
        make.append((namespace, f"nft add chain {table} arriving {{ {_CHAIN} }}"))
    make += [(namespace, f"nft add rule {table} arriving {rule} drop") for namespace, rule in rules]
    return NetworkFault(
        name,
        make,
        [
            (each, f"nft delete table {table}")
            for each, words in make
            if words.startswith("nft add table")
        ],
    )


def slowed(name: str, interfaces: Sequence[tuple[str, str]], bytes_per_s: float) -> NetworkFault:
    """Limit the rate of packets that leave those interfaces (namespace, its name)."""
    shape = f"tbf rate {bytes_per_s * 8:.0f}bit burst {BURST_BYTES} latency {QUEUED_S * 1e3:.0f}ms"
    return NetworkFault(
        name,
        [(namespace, f"tc qdisc add dev {each} root {shape}") for namespace, each in interfaces],
        [(namespace, f"tc qdisc del dev {each} root") for namespace, each in interfaces],
    )
