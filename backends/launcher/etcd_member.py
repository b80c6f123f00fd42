"""The etcd member of a deployment's host: its command, its replacement, and etcd's health.

The leading directory (metadata service of the KV store) is elected in etcd. An election needs more
than half of etcd's members (a quorum). A restarted member finds its data in the state folder and
rejoins by itself. The other members reject a member that lost its data. Such a member is removed
from the cluster, and added again with the same address.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from backends.cluster.host_plan import EtcdMember
from backends.launcher.environment import EnvironmentProblem
from mooncake_store.directory.etcd import access_problem, etcd_session, etcd_url
from mooncake_store.keys.folder import Keys

HEARTBEAT_MS, ELECTION_MS = 100, 1_000  # etcd's own defaults, which suit hosts of one site
ASK_S_MAX = 1.0  # timeout of a health call
CHANGE_S_MAX = 5.0  # timeout of a call that lists or changes members
REPLACE_S_MAX, REPLACE_PAUSE_S = 30.0, 0.5  # time limit of the retries of a change, and the pauses
MISSING = (
    "etcd is not installed, but by the cluster file this host runs a member: install it (Debian: "
    "apt-get install etcd-server), or name the endpoints of another etcd in the file"
)


def etcd_binary() -> str | None:
    return shutil.which("etcd")


class MemberRefused(EnvironmentProblem):
    """This member lost its data, and the other members reject its replacement."""


def etcd_command(
    member: EtcdMember, data_dir: Path, is_replaced: bool = False, keys: Keys | None = None
) -> list[str]:
    """The command of the member. etcd uses `--initial-...` only at the first start. Later, etcd
    reads the members from its data."""
    options = {
        "name": member.name,
        "data-dir": data_dir,
        "listen-client-urls": member.listen_client_url,
        "advertise-client-urls": member.advertised_client_url,
        "listen-peer-urls": member.listen_peer_url,
        "initial-advertise-peer-urls": member.advertised_peer_url,
        "initial-cluster": member.initial_cluster,
        "initial-cluster-token": member.token,
        "initial-cluster-state": "existing" if is_replaced else "new",
        "heartbeat-interval": HEARTBEAT_MS,
        "election-timeout": ELECTION_MS,
        # Renewals of pinned blocks add revisions to etcd. Compaction removes old revisions.
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "1h",
        "logger": "zap",
        "log-level": "warn",
    }
    if keys is not None:
        # Every client and every peer needs a certificate of the deployment's authority. etcd reads
        # certificate and private key at each handshake, and the authorities only at its start.
        for prefix in ("", "peer-"):
            options |= {
                f"{prefix}cert-file": keys.certificate,
                f"{prefix}key-file": keys.private_key,
                f"{prefix}trusted-ca-file": keys.authorities,
                f"{prefix}client-cert-auth": "true",
            }
    return [str(etcd_binary()), *(f"--{name}={value}" for name, value in options.items())]


def etcd_environment() -> dict[str, str]:
    """The environment variables of the etcd member. On some architectures, etcd 3.4 runs only if a
    variable names the architecture. A peer's address is not compared with its certificate, because
    a pod, or a host with several network cards, may connect from another address."""
    return {
        "ETCD_UNSUPPORTED_ARCH": os.uname().machine,
        "ETCD_EXPERIMENTAL_PEER_SKIP_CLIENT_SAN_VERIFICATION": "true",
    }


def replace_lost_member(member: EtcdMember, data_dir: Path, endpoints: Sequence[str]) -> bool:
    """Replace this member in the cluster if it lost its data. Return True if it was replaced.

    If the member has no data, its entry in the list of the other members decides:

        with client URLs           It ran before, so it is removed and added again.
        name, no client URLs       This is the first start of the cluster, so nothing is done.
        neither                    An earlier call added it, so it counts as replaced.
        no entry                   An earlier call removed it, so it is added.

    Returns False too if no endpoint answers. Raises MemberRefused if a change fails for
    REPLACE_S_MAX."""
    url = member.advertised_peer_url
    for endpoint in () if _has_data(data_dir) else endpoints:
        listed = _cluster_call(endpoint, "list", {})
        if listed is None:
            continue
        known = [each for each in listed["members"] if url in each["peerURLs"]]
        if unstarted := [each for each in known if not each.get("clientURLs")]:
            return not any(each.get("name") for each in unstarted)
        for each in known:
            _change(member, endpoint, "remove", {"ID": each["ID"]})
        _change(member, endpoint, "add", {"peerURLs": [url]})
        return True
    return False


def _has_data(data_dir: Path) -> bool:
    """True if the member has joined before, because joining writes a first write-ahead log."""
    return any((data_dir / "member" / "wal").glob("*.wal"))


def _change(member: EtcdMember, endpoint: str, verb: str, body: dict[str, Any]) -> None:
    """Change the members. Retries, because members that connected recently reject changes."""
    give_up_s = time.monotonic() + REPLACE_S_MAX
    while _cluster_call(endpoint, verb, body) is None:
        if time.monotonic() > give_up_s:
            raise MemberRefused(
                f"etcd member {member.name} lost its data, and {endpoint} rejects its replacement "
                f"({verb}): start the members that are down, then restart this one"
            )
        time.sleep(REPLACE_PAUSE_S)


def _cluster_call(endpoint: str, verb: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON answer; None if the call failed."""
    try:
        with etcd_session() as session:
            answer = session.post(
                f"{etcd_url(endpoint)}/v3/cluster/member/{verb}", json=body, timeout=CHANGE_S_MAX
            )
            return dict(answer.json()) if answer.status_code == 200 else None
    except (requests.RequestException, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class EtcdAnswers:
    """The endpoints that answer, and those that do not."""

    alive: tuple[str, ...]
    silent: tuple[str, ...]
    refused: str = ""  # key or certificate problem of one of the silent endpoints; "" if none

    @property
    def has_quorum(self) -> bool:
        return 2 * len(self.alive) > len(self.alive) + len(self.silent)

    def summary(self) -> str:
        members = len(self.alive) + len(self.silent)
        text = f"{len(self.alive)} of {members} members answer, {members // 2 + 1} are needed"
        text += f"; silent: {', '.join(self.silent)}" if self.silent else ""
        return f"{text}; {self.refused}" if self.refused else text


def ask_etcd(endpoints: Sequence[str]) -> EtcdAnswers:
    """Call all endpoints in parallel, each for at most ASK_S_MAX. A live member answers this call
    even without a quorum."""
    with ThreadPoolExecutor(max(len(endpoints), 1)) as pool:
        problems = dict(zip(endpoints, pool.map(_problem, endpoints), strict=True))
    return EtcdAnswers(
        tuple(each for each, problem in problems.items() if problem is None),
        tuple(each for each, problem in problems.items() if problem is not None),
        next(filter(None, problems.values()), ""),
    )


def member_serves(member: EtcdMember) -> bool:
    """True if this member is healthy, which requires a quorum."""
    return _problem(member.advertised_client_url.partition("//")[2], "health") is None


def _problem(endpoint: str, what: str = "version") -> str | None:
    """None if the endpoint answers with status 200. Else its key or certificate problem or ""."""
    try:
        with etcd_session() as session:
            answer = session.get(f"{etcd_url(endpoint)}/{what}", timeout=ASK_S_MAX)
            return None if answer.status_code == 200 else ""
    except requests.RequestException as error:
        return access_problem(etcd_url(endpoint), error)
