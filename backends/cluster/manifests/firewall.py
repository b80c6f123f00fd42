"""nftables rules of a host: each of our ports with who may open it, and nothing else of the host.

    nft -f rendered/a/firewall.nft          # loads them, and replaces what it loaded before
    nft delete table inet mooncake_NAME     # takes them away

The policy stays accept: a file that is loaded by mistake locks nobody out. The last rules close our
ports to all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import ip_address

from backends.cluster.deployment import ClusterFileInvalid, Deployment
from backends.cluster.manifests.doors import CLIENTS, MONITORS, Door, doors, hosts_of


def firewall(deployment: Deployment, host: str) -> str:
    """The text for `nft -f`; ClusterFileInvalid when hosts have names instead of addresses."""
    named = [name for name, each in deployment.hosts.items() if not _family(each.address)]
    if named:
        what = f"hosts: {', '.join(named)} have DNS names, and firewall rules need IP addresses"
        raise ClusterFileInvalid(deployment.path, (what,))
    table = f"inet mooncake_{deployment.name.replace('-', '_')}"
    open_to = list(doors(deployment, host))
    closed = [door for door in open_to if door.who != CLIENTS]
    lines = [
        f"# Rendered from {deployment.path.rpartition('/')[2]} for host {host} by `mooncake "
        "cluster render firewall`.",
        f"table {table}",  # so that there is one to delete
        f"delete table {table}",
        f"table {table} {{",
        "  chain input {",
        "    type filter hook input priority filter; policy accept;",
        "    iif lo accept",
        "    ct state established,related accept",
        *(f"    {line}" for line in _openings(deployment, open_to)),
        f"    tcp dport {{ {', '.join(door.ports for door in closed)} }} drop comment "
        '"nobody else"',
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _openings(deployment: Deployment, open_to: Sequence[Door]) -> Iterator[str]:
    for door in open_to:
        comment = f'comment "{door.what}"'
        if door.who == CLIENTS:
            yield f"tcp dport {door.ports} accept {comment}"
            continue
        if door.who == MONITORS:
            yield f"# tcp dport {door.ports}: add who may read the {door.what}"
            continue
        addresses = [deployment.hosts[name].address for name in hosts_of(deployment, door.who)]
        for family in ("ip", "ip6"):
            of_family = [address for address in addresses if _family(address) == family]
            if of_family:
                sources = ", ".join(dict.fromkeys(of_family))
                yield f"{family} saddr {{ {sources} }} tcp dport {door.ports} accept {comment}"
        if door.last_port and deployment.trusted_data_network:
            names = ", ".join(f'"{name}"' for name in deployment.trusted_data_network)
            yield f"iifname {{ {names} }} tcp dport {door.ports} accept {comment}"


def _family(address: str) -> str:
    """ip or ip6; "" for a name."""
    try:
        return "ip" if ip_address(address).version == 4 else "ip6"
    except ValueError:
        return ""
