"""nftables rules of a host: the sources that may connect to each port of the deployment.

    nft -f rendered/a/firewall.nft          # loads the rules, and replaces earlier ones
    nft delete table inet mooncake_NAME     # removes the rules

Elastic hosts are not in the cluster file. Their addresses are added on every running host, and a
later load of the rules keeps them:

    nft add element inet mooncake_NAME elastic '{ 10.77.0.9 }'

The policy stays accept, so a file that is loaded by mistake locks no administrator out. The last
rule drops packets from other sources that open a connection to the deployment's ports. Other
packets pass, because the free ports also receive answers for other programs of the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backends.cluster.deployment import ClusterFileInvalid, Deployment, is_ip
from backends.cluster.host_plan import HostPlan, host_plan
from backends.cluster.manifests.doors import CLIENTS, FLEET, MONITORS, Door, doors, hosts_of

ELASTIC = "elastic"  # name of the set of elastic hosts' addresses


def firewall(deployment: Deployment, plan: HostPlan) -> str:
    """The text for `nft -f`. Raises ClusterFileInvalid if hosts have DNS names."""
    named = [name for name, each in deployment.hosts.items() if not is_ip(each.address)]
    if named:
        what = f"hosts: {', '.join(named)} have DNS names, and firewall rules need IP addresses"
        raise ClusterFileInvalid(deployment.path, (what,))
    name = table(deployment)
    hosts = deployment.hosts.items()  # hosts with one address share a machine and the table
    here = [host_plan(deployment, name) for name, each in hosts if each.address == plan.address]
    open_to = list(dict.fromkeys(door for each in here or [plan] for door in doors(each)))
    closed = ", ".join(door.ports for door in open_to if door.who != CLIENTS)
    named_later = [f"  set {ELASTIC} {{ type ipv4_addr; flags interval; }}"]
    lines = [
        f"# Rendered from {deployment.file_name} for {plan.host} by `mooncake "
        "cluster render firewall`.",
        f"table {name} {{",
        *(named_later if deployment.elastic_pools else []),
        "  chain input { type filter hook input priority filter; policy accept; }",
        "}",
        f"flush chain {name} input",  # removes earlier rules
        f"table {name} {{",
        "  chain input {",
        "    iif lo accept",
        "    ct state established,related accept",
        *(f"    {line}" for line in _openings(deployment, open_to)),
        f'    tcp dport {{ {closed} }} tcp flags & (syn | ack) == syn drop comment "nobody else"',
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def table(deployment: Deployment) -> str:
    """The name of the table in the syntax of `nft`."""
    return f"inet mooncake_{deployment.name.replace('-', '_')}"


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
        sources = ", ".join(dict.fromkeys(addresses))
        yield f"ip saddr {{ {sources} }} tcp dport {door.ports} accept {comment}"
        if door.who == FLEET and deployment.elastic_pools:
            yield f"ip saddr @{ELASTIC} tcp dport {door.ports} accept {comment}"
        if door.last_port and deployment.trusted_data_network:
            names = ", ".join(f'"{name}"' for name in deployment.trusted_data_network)
            yield f"iifname {{ {names} }} tcp dport {door.ports} accept {comment}"
