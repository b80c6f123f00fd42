"""etcd as a host of a deployment has it: how a member is started, and whether etcd can decide.

Who leads the directories is decided by etcd's members together: by more than half of them. A member
that comes back finds its data in the state folder and takes part again by itself.

Not here: what is kept in etcd (mooncake_store/directory/election.py), starting the process
(launch.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import requests

from backends.cluster.host_plan import EtcdMember

HEARTBEAT_MS, ELECTION_MS = 100, 1_000  # etcd's own defaults, for hosts of one site
ASK_S_MAX = 1.0
MISSING = (
    "etcd is not installed, but the cluster file has this host run a member: install it (Debian: "
    "apt-get install etcd-server), or name endpoints that somebody else runs"
)


def etcd_binary() -> str | None:
    return shutil.which("etcd")


def etcd_command(member: EtcdMember, data_dir: Path) -> list[str]:
    """`--initial-...` matter at the first start only: later the data say who the members are."""
    return [
        str(etcd_binary()), "--name", member.name, "--data-dir", str(data_dir),
        "--listen-client-urls", member.listen_client_url,
        "--advertise-client-urls", member.advertised_client_url,
        "--listen-peer-urls", member.listen_peer_url,
        "--initial-advertise-peer-urls", member.advertised_peer_url,
        "--initial-cluster", member.initial_cluster,
        "--initial-cluster-token", member.token, "--initial-cluster-state", "new",
        "--heartbeat-interval", str(HEARTBEAT_MS), "--election-timeout", str(ELECTION_MS),
        # Elections write little, but each renewal of a pin is a revision.
        "--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h",
        "--logger", "zap", "--log-level", "warn",
    ]  # fmt: skip


def etcd_environment() -> dict[str, str]:
    """etcd 3.4 refuses some architectures unless it is told that this is known."""
    return {"ETCD_UNSUPPORTED_ARCH": os.uname().machine}


@dataclass(frozen=True, slots=True)
class EtcdAnswers:
    """Which of the endpoints answer at all, which tells a dead member from a lost quorum."""

    alive: tuple[str, ...]
    silent: tuple[str, ...]

    @property
    def has_quorum(self) -> bool:
        return 2 * len(self.alive) > len(self.alive) + len(self.silent)

    def said(self) -> str:
        members = len(self.alive) + len(self.silent)
        needed = members // 2 + 1
        silent = f"; silent: {', '.join(self.silent)}" if self.silent else ""
        return f"{len(self.alive)} of {members} members answer, {needed} are needed{silent}"


def ask_etcd(endpoints: Sequence[str]) -> EtcdAnswers:
    """All at once, each at most ASK_S_MAX: a member that is there answers without a quorum too."""
    with ThreadPoolExecutor(max(len(endpoints), 1)) as pool:
        answers = list(pool.map(_is_there, endpoints))
    return EtcdAnswers(
        tuple(each for each, is_there in zip(endpoints, answers, strict=True) if is_there),
        tuple(each for each, is_there in zip(endpoints, answers, strict=True) if not is_there),
    )


def _is_there(endpoint: str) -> bool:
    session = requests.Session()
    session.trust_env = False  # etcd is near, whatever http_proxy says
    try:
        return session.get(f"http://{endpoint}/version", timeout=ASK_S_MAX).status_code == 200
    except requests.RequestException:
        return False
    finally:
        session.close()
