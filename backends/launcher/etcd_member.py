"""etcd as a host of a deployment has it: how a member is started, and whether etcd can decide.

Who leads the directories is decided by etcd's members together: by more than half of them. A member
that comes back finds its data in the state folder and takes part again by itself. One whose data
are lost is refused by the others, so it is replaced: removed and added under the same address.

Not here: what is kept in etcd (mooncake_store/directory/election.py), starting the process
(launch.py).
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
from mooncake_store.directory.etcd import access_problem, etcd_session, etcd_url
from mooncake_store.keys.folder import Keys

HEARTBEAT_MS, ELECTION_MS = 100, 1_000  # etcd's own defaults, for hosts of one site
ASK_S_MAX = 1.0
CHANGE_S_MAX = 5.0
REPLACE_S_MAX, REPLACE_PAUSE_S = 30.0, 0.5
MISSING = (
    "etcd is not installed, but the cluster file has this host run a member: install it (Debian: "
    "apt-get install etcd-server), or name endpoints that somebody else runs"
)


def etcd_binary() -> str | None:
    return shutil.which("etcd")


class MemberRefused(Exception):
    """This member lost its data, and the others do not let it begin anew."""


def etcd_command(
    member: EtcdMember, data_dir: Path, is_replaced: bool = False, keys: Keys | None = None
) -> list[str]:
    """`--initial-...` matter at the first start only: later the data say who the members are."""
    return [
        str(etcd_binary()),
        "--name",
        member.name,
        "--data-dir",
        str(data_dir),
        "--listen-client-urls",
        member.listen_client_url,
        "--advertise-client-urls",
        member.advertised_client_url,
        "--listen-peer-urls",
        member.listen_peer_url,
        "--initial-advertise-peer-urls",
        member.advertised_peer_url,
        "--initial-cluster",
        member.initial_cluster,
        "--initial-cluster-token",
        member.token,
        "--initial-cluster-state",
        "existing" if is_replaced else "new",
        "--heartbeat-interval",
        str(HEARTBEAT_MS),
        "--election-timeout",
        str(ELECTION_MS),
        # Elections write little, but each renewal of a pin is a revision.
        "--auto-compaction-mode",
        "periodic",
        "--auto-compaction-retention",
        "1h",
        "--logger",
        "zap",
        "--log-level",
        "warn",
        *_tls_arguments(keys),
    ]


def _tls_arguments(keys: Keys | None) -> list[str]:
    """Who shows no certificate of the cluster is neither a client nor a peer. They name files:
    etcd reads certificate and key at each handshake, the authorities when it starts."""
    if keys is None:
        return []
    certificate, private_key = str(keys.certificate), str(keys.private_key)
    return [
        "--cert-file",
        certificate,
        "--key-file",
        private_key,
        "--trusted-ca-file",
        str(keys.authorities),
        "--client-cert-auth",
        "--peer-cert-file",
        certificate,
        "--peer-key-file",
        private_key,
        "--peer-trusted-ca-file",
        str(keys.authorities),
        "--peer-client-cert-auth",
    ]


def etcd_environment() -> dict[str, str]:
    """etcd 3.4 refuses some architectures unless it is told that this is known. A peer may call
    from any address (a host with several cards, a pod): its certificate says that it takes part."""
    return {
        "ETCD_UNSUPPORTED_ARCH": os.uname().machine,
        "ETCD_EXPERIMENTAL_PEER_SKIP_CLIENT_SAN_VERIFICATION": "true",
    }


def replace_lost_member(member: EtcdMember, data_dir: Path, endpoints: Sequence[str]) -> bool:
    """Where this member has no data, but the others know it: have them take it anew. MemberRefused.

    One that has never started has not told them where its clients call it: with a name it is of
    the first start of a whole cluster, without one it was added by an earlier call of this, after
    which the host died.
    """
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
    """etcd makes folders before it takes part, and its log when it does."""
    return any((data_dir / "member" / "wal").glob("*.wal"))


def _change(member: EtcdMember, endpoint: str, verb: str, body: dict[str, Any]) -> None:
    """Again for a while: members that were connected only lately let nobody change the cluster."""
    give_up_s = time.monotonic() + REPLACE_S_MAX
    while _cluster_call(endpoint, verb, body) is None:
        if time.monotonic() > give_up_s:
            raise MemberRefused(
                f"the data of etcd's member {member.name} are lost, and {endpoint} does not let it "
                f"take part anew ({verb}): start the members that are down, then this one again"
            )
        time.sleep(REPLACE_PAUSE_S)


def _cluster_call(endpoint: str, verb: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """None when it was not carried out."""
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
    """Which of the endpoints answer at all, which tells a dead member from a lost quorum."""

    alive: tuple[str, ...]
    silent: tuple[str, ...]
    refused: str = ""  # what one of the silent ones has against this host's keys

    @property
    def has_quorum(self) -> bool:
        return 2 * len(self.alive) > len(self.alive) + len(self.silent)

    def said(self) -> str:
        members = len(self.alive) + len(self.silent)
        needed = members // 2 + 1
        silent = f"; silent: {', '.join(self.silent)}" if self.silent else ""
        refused = f"; {self.refused}" if self.refused else ""
        return (
            f"{len(self.alive)} of {members} members answer, {needed} are needed{silent}{refused}"
        )


def ask_etcd(endpoints: Sequence[str]) -> EtcdAnswers:
    """All at once, each at most ASK_S_MAX: a member that is there answers without a quorum too."""
    with ThreadPoolExecutor(max(len(endpoints), 1)) as pool:
        problems = dict(zip(endpoints, pool.map(_problem, endpoints), strict=True))
    return EtcdAnswers(
        tuple(each for each, problem in problems.items() if problem is None),
        tuple(each for each, problem in problems.items() if problem is not None),
        next(filter(None, problems.values()), ""),
    )


def member_serves(member: EtcdMember) -> bool:
    """Does it answer by itself, as one of a quorum?"""
    return _problem(member.advertised_client_url.partition("//")[2], "health") is None


def _problem(endpoint: str, what: str = "version") -> str | None:
    """None: it answers. "": it does not. Or why one of the two sides does not believe the other."""
    try:
        with etcd_session() as session:
            answer = session.get(f"{etcd_url(endpoint)}/{what}", timeout=ASK_S_MAX)
            return None if answer.status_code == 200 else ""
    except requests.RequestException as error:
        return access_problem(etcd_url(endpoint), error)
