"""The state of all hosts of a deployment, from etcd, the directory and the frontends.

The state of a part that does not answer has the reason. Each query times out after ASK_S_MAX.
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from backends.cluster.deployment import Deployment, is_loopback
from backends.cluster.host_plan import HostPlan, host_plan
from backends.direct_http import CALL_FAILED, direct_opener
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.election import leader_at, waiting_at
from mooncake_store.directory.etcd import etcd_url
from mooncake_store.errors import StoreError
from mooncake_store.keys.tls import contexts_of_process, refusal_words
from mooncake_store.records.events import Snapshot
from mooncake_store.records.membership import WorkerInfo
from mooncake_store.records.status import DirectoryStats, HolderStats

ASK_S_MAX = 2.0  # seconds
ASKED_AT_ONCE = 32  # limit of parallel queries
UP, DOWN, UNKNOWN = "up", "DOWN", "not asked"


@dataclass(frozen=True, slots=True)
class HostStatus:
    """The parts of a host and their states. Each endpoint of an external etcd counts as a host."""

    name: str
    address: str
    parts: Mapping[str, str] = field(default_factory=dict)  # name of the part -> its state

    @property
    def down(self) -> list[str]:
        return [
            f"{self.name}: {part}: {state}" for part, state in self.parts.items() if DOWN in state
        ]


@dataclass(frozen=True, slots=True)
class FleetStatus:
    hosts: Sequence[HostStatus]
    strangers: Sequence[str]  # a line for each registered worker or node that is not in the file
    problem: str = ""  # reason why the directory did not answer; "" if it did

    @property
    def is_well(self) -> bool:
        return not self.problem and not any(host.down for host in self.hosts)


@dataclass(frozen=True, slots=True)
class _Known:
    """The answers of etcd and the directory. Without an answer, fields keep their defaults."""

    leader: str = ""  # address of the leading directory
    # Addresses of the candidates that do not lead; None if etcd did not answer.
    waiting: Collection[str] | None = None
    snapshot: Snapshot | None = None
    stats: DirectoryStats | None = None
    problem: str = ""  # reason why etcd or the directory did not answer; "" if both did


def fleet_status(deployment: Deployment, directory: str) -> FleetStatus:
    """Query every part once, in parallel."""
    known = _ask_directory(deployment, directory)
    plans = [host_plan(deployment, name) for name in deployment.hosts]
    endpoints = deployment.etcd.endpoints if deployment.etcd else ()
    others = {each: f"{etcd_url(each)}/health" for each in endpoints}
    urls = {url for plan in plans for url in _urls(deployment, plan).values()} | {*others.values()}
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        answers = dict(zip(urls, pool.map(_answers, urls), strict=True))
    hosts = [_host(deployment, plan, known, answers) for plan in plans]
    hosts += [HostStatus(each, each, {"etcd": answers[url]}) for each, url in others.items()]
    return FleetStatus(hosts, _strangers(deployment, known), known.problem)


def _ask_directory(deployment: Deployment, address: str) -> _Known:
    is_elected = deployment.etcd is not None
    leader = "" if is_elected else address
    waiting: Collection[str] | None = None if is_elected else ()
    try:
        if is_elected:
            waiting = waiting_at(address, ASK_S_MAX)
            leader = leader_at(address, ASK_S_MAX).address
        with DirectoryClient(address, timeout_s=ASK_S_MAX) as client:
            return _Known(leader, waiting, client.snapshot(), client.stats())
    except StoreError as error:
        return _Known(leader, waiting, problem=f"{type(error).__name__}: {error}")


def _urls(deployment: Deployment, plan: HostPlan) -> dict[str, str]:
    """The health URL of each part that has one."""
    found = {}
    if plan.etcd is not None:
        found["etcd"] = f"{plan.etcd.advertised_client_url}/health"
    if plan.frontend is not None and not is_loopback(deployment.frontends.address):
        port = plan.frontend.http.rpartition(":")[2]
        found["frontend"] = f"http://{plan.address}:{port}/v2/models/conductor/ready"
    return found


def _answers(url: str) -> str:
    """UP, or DOWN with the reason."""
    try:
        with _opener().open(url, timeout=ASK_S_MAX) as answer:
            return UP if answer.status == 200 else f"{DOWN}: status {answer.status}"
    except urllib.error.HTTPError as error:
        return f"{DOWN}: status {error.code}"
    except CALL_FAILED as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            reason = refusal_words(url, reason)
        return f"{DOWN}: {reason}".rstrip()


def _opener() -> urllib.request.OpenerDirector:
    """An opener that ignores http_proxy. It presents the certificate that etcd members require."""
    contexts = contexts_of_process()
    tls = urllib.request.HTTPSHandler(context=contexts.client if contexts is not None else None)
    return direct_opener(tls)


def _unreached(ready_url: str) -> dict[str, str]:
    """Worker -> reason, for the workers that the frontend with this `ready_url` cannot call."""
    url = ready_url.removesuffix("ready") + "generate"
    asked = json.dumps({"stream": False, "describe": True}).encode()
    try:
        with _opener().open(url, asked, timeout=ASK_S_MAX) as answer:
            described = json.loads(json.load(answer)["text_output"])
            return dict(described["unreached_workers"])
    except (*CALL_FAILED, ValueError, KeyError, TypeError):
        return {}  # the state of the frontend shows the failure


def _host(
    deployment: Deployment, plan: HostPlan, known: _Known, answers: Mapping[str, str]
) -> HostStatus:
    urls = _urls(deployment, plan)
    parts: dict[str, str] = {part: answers[url] for part, url in urls.items()}
    if parts.get("frontend") == UP:
        for model, why in _unreached(urls["frontend"]).items():
            parts[f"frontend to {model}"] = f"{DOWN}: {why}"
    if plan.frontend is not None and "frontend" not in parts:
        parts["frontend"] = f"{UNKNOWN}: it listens on {deployment.frontends.address} only"
    if plan.directory is not None:
        parts["directory"] = _directory(plan.directory.advertised, known)
    if known.snapshot is None or known.stats is None:
        return HostStatus(plan.host, plan.address, parts)
    holders = {holder.node_id: holder for holder in known.stats.nodes}
    for node in plan.storage_nodes:
        parts[f"node {node.name}"] = _node(holders.get(node.name))
    for worker in plan.workers:
        parts[worker.model] = _worker(known.snapshot, worker.model)
    return HostStatus(plan.host, plan.address, parts)


def _directory(address: str, known: _Known) -> str:
    if known.leader == address:
        return f"{DOWN}: does not answer" if known.problem else "leads"
    if known.waiting is None:
        return f"{UNKNOWN}: etcd does not answer"
    return "waits" if address in known.waiting else f"{DOWN}: neither leads nor waits to"


def _node(holder: HolderStats | None) -> str:
    if holder is None:
        return DOWN
    share = 100 * holder.used_units / max(1, holder.units)
    state = f"{share:.0f} % of {holder.segment_bytes >> 20} MiB, {holder.ready_blocks} blocks"
    return state + ", draining" * holder.is_draining


def _worker(snapshot: Snapshot, model: str) -> str:
    """The state of the newest incarnation of the worker."""
    found: list[WorkerInfo] = [each for each in snapshot.workers if each.worker_id == model]
    if not found:
        return DOWN
    incarnation = found[-1].incarnation
    for report in snapshot.reports:
        if (report.worker_id, report.incarnation) == (model, incarnation):
            state = f"{report.running} running, {report.queue_requests} queued"
            return state + ", draining" * report.is_draining
    return "up, no report yet"


def _strangers(deployment: Deployment, known: _Known) -> list[str]:
    """A line for each registered worker or node that is not in the file, as on elastic hosts."""
    if known.snapshot is None:
        return []
    models = {worker.model for worker in deployment.workers}
    nodes = {node.name for node in deployment.storage_nodes}
    found = [
        f"{worker.worker_id} at {worker.grpc_address or 'an unknown address'}: "
        f"{_worker(known.snapshot, worker.worker_id)}"
        for worker in known.snapshot.workers
        if worker.worker_id not in models
    ]
    found += [
        f"node {info.node_id}"
        for info in known.snapshot.nodes
        if not info.is_ssd and info.node_id not in nodes
    ]
    return sorted(set(found))
