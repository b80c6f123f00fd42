"""Parses a cluster file (YAML) into a `Deployment`, or reports every mistake of the file.

One method or class reads each section. `_check_together` then compares the sections. The template
of a worker is a config.pbtxt of the base model repository. The parameters in the cluster file
override those of the template. The result is checked as a model checks it when it loads.

Not here: the meaning of the keys (deployment.py), YAML itself (section.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from backends.cluster.deployment import (
    NODE_PORT,
    ClusterFileInvalid,
    Deployment,
    Directories,
    Elastic,
    EtcdCluster,
    Frontends,
    Host,
    NodeSpec,
    PoolSpec,
    WorkerSpec,
    is_ip,
    is_loopback,
)
from backends.cluster.model_rendering import (
    ROLES,
    TemplateMissing,
    parameters_of,
    template,
    templates_in,
)
from backends.cluster.section import (
    CHARACTERS_MAX,
    PORT_MAX,
    FileSection,
    Mistakes,
    YamlInvalid,
    did_you_mean,
    read_tree,
)
from backends.config_pbtxt import FrontendConfig, check_configs
from backends.shipped import named_or_shipped
from backends.triton.worker_kinds import config_classes
from conductor.config import ConductorConfig

NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", re.ASCII)
NAME_WANTED = "small letters, digits and '-' (at most 40, beginning with a letter)"
ADDRESS_WANTED = "an IPv4 address or a DNS name that has one (IPv6 is not supported)"
DNS_NAME = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9])?"
    r"(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*",
    re.ASCII,
)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
INTERFACE = re.compile(r"[^\s/,:]{1,15}")
POOL_KEYS = ("role", "workers", "grpc_port", "elastic")  # all other keys are worker parameters
OF_ENGINES = ("page_tokens", "tp_size", "handoff")  # parameters that only some engines have
# Parameters that must be equal in all workers, because the workers share stored blocks.
FINGERPRINT = ("checkpoint", "engine", "dtype", "kv_dtype", "block_tokens", *OF_ENGINES)
SET_BY_THE_FILE = ("checkpoint", "store_node", "gpus")  # never taken from a worker's template
WORKERS_MAX = 64  # limit of the workers of one pool on one host
HOSTS_MAX = 1_000
PORT_STEP = 100  # difference between the default ports of successive pools
SLO = {"ttft_s": "ttft_slo_s", "tbt_s": "tbt_slo_s"}  # key of `slo` -> parameter of the conductor
NODE_BYTES_MIN = 1 << 20  # smallest DRAM of a storage node


def load(path: Path, base: Path | None = None) -> Deployment:
    """Raises ClusterFileInvalid with every mistake, or if the file cannot be read. `base`: the
    model repository with the templates. If `base` is None or missing, no template is merged."""
    try:
        with path.open("rb") as file:
            content = file.read(4 * CHARACTERS_MAX + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        problem = f"cannot be read ({error.strerror}): check its path (--cluster) and permissions"
        raise ClusterFileInvalid(str(path), (problem,)) from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"line {line}: byte 0x{content[error.start]:02x} is not UTF-8: save the file so"
        raise ClusterFileInvalid(str(path), (problem,)) from None
    return parse(
        text, str(path), templates_in(base) if base and named_or_shipped(base).is_dir() else {}
    )


def parse(
    text: str, path: str = "cluster.yaml", templates: Mapping[str, str] | None = None
) -> Deployment:
    """Raises ClusterFileInvalid with every mistake, and no other exception. `templates` maps each
    model of the base repository to the text of its config.pbtxt."""
    try:
        tree, problems = read_tree(text)
    except YamlInvalid as error:
        raise ClusterFileInvalid(path, (str(error),)) from None
    mistakes = Mistakes()
    for line, what in problems:
        mistakes.note(line, "", what)
    deployment = _ClusterFile(FileSection(tree, "", mistakes), path, templates or {}).read()
    if mistakes.found:
        raise ClusterFileInvalid(path, mistakes.lines())
    return deployment


@dataclass(slots=True)
class _ClusterFile:
    """Reads the sections in order. A later section may name hosts and nodes of an earlier one."""

    top: FileSection  # the whole file
    path: str
    templates: Mapping[str, str]
    hosts: dict[str, Host] = field(default_factory=dict)
    nodes: list[NodeSpec] = field(default_factory=list)
    # Pool -> its parameters: those of the file, and others from its template.
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)  # names of parameters that some pool has

    def read(self) -> Deployment:
        top = self.top
        name = top.word("name", "", NAME.fullmatch, NAME_WANTED)
        if not top.has("name"):
            top.note("name", "is missing: give the deployment a name")
        self.hosts = dict(self._hosts(top.section("hosts")))
        if not self.hosts:
            top.note("hosts", "is missing: name at least one, like a: {address: 10.0.0.1}")
        etcd = self._etcd(top.section("etcd")) if top.has("etcd") else None
        directories = self._directories(top.section("directories"))
        self.nodes = list(self._nodes(top.section("storage_nodes")))
        frontends = self._frontends(top.section("frontends"))
        pools = self._pools(top.section("pools"), top.section("defaults"))
        checkpoint = _agreed(self.settings, top)
        deployment = Deployment(
            name=name,
            path=self.path,
            hosts=self.hosts,
            etcd=etcd,
            directories=directories,
            storage_nodes=tuple(self.nodes),
            frontends=frontends,
            pools=tuple(pools),
            conductor=self._conductor(checkpoint),
            checkpoint=checkpoint,
            **self._keys(top.section("keys")),
        )
        top.close()
        _check_together(deployment, top)
        return deployment

    def _hosts(self, section: FileSection) -> Iterator[tuple[str, Host]]:
        if len(section.names()) > HOSTS_MAX:
            section.note("", f"has more than {HOSTS_MAX} hosts: make several deployments")
            return
        for name, host in section.sections():
            if not NAME.fullmatch(name):
                section.note(name, f"is no valid host name; use {NAME_WANTED}")
            if not host.has("address"):
                section.note(name, "has no address for other hosts: add one (address: IP)")
            unread = f"{name}.invalid"  # stands for an invalid address while the file is read
            address = host.word("address", unread, _is_address, ADDRESS_WANTED)
            default = address if is_ip(address) else "0.0.0.0"
            if address == "localhost":
                default = "127.0.0.1"
            yield (
                name,
                Host(
                    name=name,
                    address=address,
                    listen=host.word("listen", default, is_ip, "an IPv4 address of the host"),
                    identity=host.text("identity") or "",
                    state_dir=host.text("state_dir") or f".mooncake/{name}",
                    rack=host.text("rack") or "",
                    environment=self._environment(host.section("environment")),
                ),
            )
            host.close()

    def _environment(self, section: FileSection) -> dict[str, str]:
        found = section.others()
        for name in found:
            if not VARIABLE.fullmatch(name):
                section.note(name, "is no valid name of an environment variable")
            elif name.startswith("MOONCAKE_"):
                section.note(name, "is set by `mooncake serve` from this file: remove it")
            elif "\0" in found[name]:
                section.note(name, "contains a zero byte: remove it")
        return found

    def _named_hosts(
        self, section: FileSection, default: tuple[str, ...], if_twice: str = "remove one"
    ) -> tuple[str, ...]:
        """The defined hosts in the list `hosts` of a section; `default` if there are none."""
        found = section.words("hosts", if_twice)
        for name, line in found:
            self.look_up_host(name, line, section.path_of("hosts"))
        return tuple(name for name, _ in found if name in self.hosts) or default

    def look_up_host(self, name: str, line: int, path: str) -> bool:
        if name in self.hosts:
            return True
        what = f"there is no host {name!r}{did_you_mean(name, set(self.hosts))}"
        self.top.mistakes.note(line, path, what)
        return False

    def _first_host(self) -> tuple[str, ...]:
        return tuple(list(self.hosts)[:1])

    def _etcd(self, section: FileSection) -> EtcdCluster:
        endpoints = section.words("endpoints")
        for endpoint, line in endpoints:
            host, _, port = endpoint.rpartition(":")
            if not _is_address(host) or not _is_port(port):
                self.top.mistakes.note(
                    line, section.path_of("endpoints"), f"{endpoint!r} is no HOST:PORT"
                )
        found = EtcdCluster(
            hosts=self._named_hosts(section, ()),
            endpoints=tuple(endpoint for endpoint, _ in endpoints),
            client_port=section.port("client_port", 2379),
            peer_port=section.port("peer_port", 2380),
        )
        if section.has("hosts") == section.has("endpoints"):
            what = "name either hosts, to start members there, or endpoints of a running etcd"
            section.note("", what)
        section.close()
        return found

    def _directories(self, section: FileSection) -> Directories:
        found = Directories(
            hosts=self._named_hosts(section, self._first_host()),
            port=section.port("port", 7001),
            events_port=section.port("events_port", 7002),
            ttl_s=section.number("ttl_s", 3, 1, 60),
        )
        if len(found.hosts) > 1 and not self.top.has("etcd"):
            section.note("hosts", "several directories elect a leader in etcd: add a section etcd")
        section.close()
        return found

    def _nodes(self, section: FileSection) -> Iterator[NodeSpec]:
        seen: dict[str, int] = {}
        for name, node in section.sections():
            if not NAME.fullmatch(name):
                section.note(name, f"is no valid name of a storage node; use {NAME_WANTED}")
            host = node.text("host") or ""
            if not host:
                section.note(name, "has no host: name the host that it runs on (host: NAME)")
            elif not self.look_up_host(host, node.line_of("host"), node.path_of("host")):
                host = ""
            number = seen[host] = seen.get(host, -1) + 1
            if not node.has("dram"):
                section.note(name, "has no dram: give its memory size (dram: 4G)")
            spec = NodeSpec(
                name=name,
                host=host,
                dram_bytes=node.size_bytes("dram", NODE_BYTES_MIN, NODE_BYTES_MIN),
                ssd_bytes=node.size_bytes("ssd", 0),
                ssd_path=node.text("ssd_path") or "ssd",
                segment_path=node.text("segment_path") or "",
                control_port=node.port("control_port", NODE_PORT + 2 * number),
                data_port=node.port("data_port", NODE_PORT + 2 * number + 1),
            )
            node.close()
            if host:
                yield spec

    def _frontends(self, section: FileSection) -> Frontends:
        found = Frontends(
            hosts=self._named_hosts(
                section,
                self._first_host() if self.top.has("pools") else (),
                "define a second frontend on a machine as another host with its address",
            ),
            address=section.word("address", "127.0.0.1", is_ip, "an IPv4 address, or 0.0.0.0"),
            http_port=section.port("http_port", 8000),
            grpc_port=section.port("grpc_port", 8001),
            metrics_port=section.port("metrics_port", 8002),
            metrics_address=section.word(
                "metrics_address", "127.0.0.1", is_ip, "an IPv4 address, or 0.0.0.0"
            ),
        )
        section.close()
        return found

    def _pools(self, section: FileSection, defaults: FileSection) -> list[PoolSpec]:
        common = defaults.others()
        found = []
        for number, (name, pool) in enumerate(section.sections()):
            if not NAME.fullmatch(name):
                section.note(name, f"is no valid pool name; use {NAME_WANTED}")
            reader = _PoolReader(self, name, pool, defaults, common)
            found.append(reader.read(7100 + PORT_STEP * number))
        known = self.known or {name for role in ROLES for name in _known(role, common)}
        for name in common.keys() - known:
            defaults.note(name, f"unknown parameter{did_you_mean(name, known)}")
        return found

    def _conductor(self, checkpoint: str) -> dict[str, str]:
        """The parameters of the conductor, including those of `slo`, and the checkpoint."""
        section, slo = self.top.section("conductor"), self.top.section("slo")
        given = section.others()
        where = {name: (section, name) for name in given}  # parameter -> its section and key
        for short, name in SLO.items():
            if (text := slo.text(short)) is not None:
                if name in given:
                    slo.note(short, f"is set by conductor.{name} too: remove one")
                given[name], where[name] = text, (slo, short)
        slo.close()
        given.setdefault("checkpoint", checkpoint)
        if given["checkpoint"] != checkpoint:
            section.note("checkpoint", f"is not that of the workers ({checkpoint}): remove it")
        known = {each.name for cls in (FrontendConfig, ConductorConfig) for each in fields(cls)}
        for name in given.keys() - known:
            section.note(name, f"unknown parameter{did_you_mean(name, known)}")
        known_given = {name: value for name, value in given.items() if name in known}
        _, problems = check_configs((FrontendConfig, ConductorConfig), known_given)
        for problem in problems:
            name = _parameter_of(problem, given)
            owner, key = where.get(name, (section, name))
            owner.note(key, problem.removeprefix(f"{name} "))
        return given

    def _keys(self, section: FileSection) -> dict[str, Any]:
        folder = section.text("folder") or ""
        is_insecure = section.truth("insecure", False)
        if section.is_there and bool(folder) == is_insecure:
            section.note("", "set either folder: NAME or insecure: true")
        section.close()
        found = self.top.words("trusted_data_network")
        for name, line in found:
            if not INTERFACE.fullmatch(name):
                what = f"{name!r} is no valid name of a network interface"
                self.top.mistakes.note(line, "trusted_data_network", what)
        is_named = self.top.has("trusted_data_network") or bool(folder)
        return {
            "keys_folder": folder,
            "is_insecure": is_insecure,
            "trusted_data_network": tuple(name for name, _ in found) if is_named else None,
        }


@dataclass(slots=True)
class _PoolReader:
    """Reads one pool, whose parameters override those of `defaults`."""

    file: _ClusterFile
    name: str
    section: FileSection
    defaults: FileSection
    common: Mapping[str, str]  # parameters of `defaults`
    shipped: dict[str, str] = field(default_factory=dict)  # parameters of the workers' template

    def read(self, grpc_port: int) -> PoolSpec:
        section, name = self.section, self.name
        guess = next((role for role in ROLES if name.startswith(role)), "")
        role = section.word("role", guess, ROLES.__contains__, " or ".join(ROLES))
        if not role and not section.has("role"):
            section.note("", "has no role: add role: prefill or role: decode")
        own = section.others(*POOL_KEYS)
        self._read_template(role, {**self.common, **own})
        known = _known(role or "prefill", {**self.shipped, **self.common, **own})
        self.file.known |= known
        parameters = {key: self.common[key] for key in self.common if key in known} | own
        self.file.settings[name] = {**self.shipped, **parameters}
        if role:
            self._check(role, parameters, section)
        port = section.port("grpc_port", grpc_port)
        workers = tuple(self._workers(role, parameters, port))
        if any(worker.grpc_port > PORT_MAX for worker in workers):
            section.note(
                "grpc_port",
                f"is {port}, and further workers of a host need the following ports, beyond "
                f"{PORT_MAX}: use a lower one",
            )
        elastic = self._elastic()
        if not section.has("workers") and elastic is None:
            section.note("", "has no workers: give a number for each host (workers: {a: 1})")
        section.close()
        return PoolSpec(
            name=name,
            role=role,
            grpc_port=port,
            parameters=parameters,
            workers=workers,
            elastic=elastic,
        )

    def _read_template(self, role: str, raw: Mapping[str, str]) -> None:
        try:
            shipped = parameters_of(template(role, raw, self.file.templates))
        except TemplateMissing:  # reported when the models are rendered
            return
        known = _known(role, {**shipped, **raw})
        if unknown := sorted(shipped.keys() - known):
            what = (
                f"its template sets {', '.join(unknown)}, which its engine does not have: name a "
                "model repository with a model of that engine (--model-repository), or set the "
                "engine of the existing model"
            )
            self.section.note("", what)
        taken = known.difference(SET_BY_THE_FILE)
        self.shipped = {name: value for name, value in shipped.items() if name in taken}

    def _elastic(self) -> Elastic | None:
        section = self.section.section("elastic")
        if not section.is_there:
            return None
        least = section.number("least", 1, 0, HOSTS_MAX)
        most = section.number("most", max(1, least), 1, HOSTS_MAX)
        if most < least:
            section.note("most", f"is {most}, which is below least ({least})")
        dram_bytes = section.size_bytes("dram", 1 << 30, NODE_BYTES_MIN)
        section.close()
        return Elastic(least, most, dram_bytes)

    def _workers(self, role: str, parameters: Mapping[str, str], port: int) -> Iterator[WorkerSpec]:
        """The workers of all hosts. For each host, the file has a number of workers, or a list with
        the parameters of each worker."""
        section = self.section.section("workers")
        for host in section.names():
            entry = section.entry(host)
            if not self.file.look_up_host(host, section.line_of(host), section.path_of(host)):
                continue
            own: list[dict[str, str]] = []
            if entry is not None and entry.items is not None:
                if len(entry.items) > WORKERS_MAX:
                    what = f"lists {len(entry.items)} workers; use {WORKERS_MAX} or fewer"
                    section.note(host, what)
                for number, item in enumerate(entry.items[:WORKERS_MAX]):
                    each = FileSection(
                        item, f"{section.path_of(host)}[{number}]", self.section.mistakes
                    )
                    own.append(each.others())
                    if role:
                        self._check(role, {**parameters, **own[-1]}, each, only=own[-1])
                    for name in FINGERPRINT:
                        if name in own[-1]:
                            each.note(name, "must be the same in every worker: set it in defaults")
            else:
                own = [{}] * section.number(host, 0, 0, WORKERS_MAX)
            for number, each_own in enumerate(own):
                node = each_own.get("store_node") or parameters.get("store_node") or ""
                yield WorkerSpec(
                    model=f"{self.name}_{host}_{number}",
                    host=host,
                    grpc_port=port + number,
                    store_node=node or self._node_of(host, number),
                    parameters=each_own,
                )

    def _node_of(self, host: str, number: int) -> str:
        """The storage node of worker `number`, round-robin; "" if the host has no node."""
        own = [node.name for node in self.file.nodes if node.host == host]
        return own[number % len(own)] if own else ""

    def _check(
        self,
        role: str,
        raw: Mapping[str, str],
        section: FileSection,
        only: Mapping[str, str] | None = None,
    ) -> None:
        """Note the mistakes in the parameters `raw`, or only mistakes in parameters of `only`."""
        known = _known(role, {**self.shipped, **raw})
        for name in (raw if only is None else only).keys() - known:
            section.note(name, f"unknown parameter{did_you_mean(name, known)}")
        known_raw = {name: value for name, value in raw.items() if name in known}
        merged = {**self.shipped, **known_raw}
        classes, together = config_classes(role, merged)
        for problem in check_configs(classes, merged, together)[1]:
            name = _parameter_of(problem, known_raw)
            if only is not None and name not in only:
                continue
            is_default = name in self.defaults.names() and name not in section.names()
            owner = self.defaults if is_default else section
            owner.note(name, problem.removeprefix(f"{name} "))


def _defaults(role: str, raw: Mapping[str, str]) -> dict[str, str]:
    """Parameter -> its default, for a worker with the parameters `raw`."""
    classes, _ = config_classes(role, raw)
    return {each.name: str(each.default) for cls in classes for each in fields(cls)}


def _known(role: str, raw: Mapping[str, str]) -> set[str]:
    return set(_defaults(role, raw))


def _parameter_of(problem: str, raw: Mapping[str, str]) -> str:
    """The first parameter of `raw` that the problem names; "" if it names none."""
    words = re.findall(r"[A-Za-z_][A-Za-z0-9_]*", problem)
    return next((word for word in words if word in raw), "")


def _agreed(settings: Mapping[str, Mapping[str, str]], top: FileSection) -> str:
    """Note each parameter of FINGERPRINT that differs between pools. Return the checkpoint."""
    full = {pool: {**_defaults(ROLES[0], raw), **raw} for pool, raw in settings.items()}
    for name in FINGERPRINT:
        values = {pool: each[name] for pool, each in full.items() if name in each}
        if len(set(values.values())) > 1:
            found = ", ".join(f"{pool} {value}" for pool, value in values.items())
            what = f"all workers need the same {name} to share stored blocks, but have {found}"
            top.note("pools", f"{what}; set it in defaults")
    return next((each.get("checkpoint", "demo") for each in settings.values()), "demo")


def _check_together(deployment: Deployment, top: FileSection) -> None:
    """Note mistakes that only a comparison of sections shows."""
    for worker in deployment.workers:
        own = {node.name for node in deployment.nodes_of(worker.host)}
        if not own:
            what = f"host {worker.host} has workers, but no storage node for their KV: add one, "
            top.note("storage_nodes", f"{what}{worker.host}0: {{host: {worker.host}, dram: 4G}}")
        elif worker.store_node not in own:
            what = f"{worker.model}: host {worker.host} has no storage node {worker.store_node!r}"
            top.note("pools", what + did_you_mean(worker.store_node, own))
    roles = {pool.role for pool in deployment.pools}
    for role in ROLES:
        if deployment.pools and roles <= set(ROLES) and role not in roles:
            top.note("pools", f"no pool has the role {role}: requests need both roles")
    _check_addresses(deployment, top)
    for (address, port), users in sorted(deployment.ports().items()):
        if len(users) > 1:
            both = " and ".join(user for _, user in users)
            top.note(users[-1][0], f"port {port} of {address} is used by {both}: change one")
        if port > PORT_MAX and users[0][0] == "frontends":
            what = f"port {port} of {address}, for {users[0][1]}, is beyond {PORT_MAX}"
            top.note("frontends", f"{what}: use lower ones")


def _check_addresses(deployment: Deployment, top: FileSection) -> None:
    hosts = deployment.hosts.values()
    local = [host.name for host in hosts if is_loopback(host.address)]
    if local and len(local) < len(hosts):
        for name in local:
            what = f"host {name} has a loopback address, which the other hosts cannot reach"
            top.note("hosts", what)
    for host in hosts:
        if is_loopback(host.listen) and not is_loopback(host.address):
            what = f"host {host.name} listens on loopback only, so others cannot reach it"
            top.note("hosts", f"{what}: remove its listen")
    identities = [host.identity for host in hosts if host.identity]
    for identity in {each for each in identities if identities.count(each) > 1}:
        top.note("hosts", f"two hosts have the identity {identity!r}: each needs its own")
    shown = [host.address for host in hosts] + [host.listen for host in hosts]
    if deployment.frontends.hosts:
        shown += [deployment.frontends.address, deployment.frontends.metrics_address]
    is_open = not all(is_loopback(address) for address in shown)
    if is_open and not deployment.keys_folder and not deployment.is_insecure:
        what = (
            "is missing: ports are open to other machines; set folder: keys (`mooncake keys` makes "
            "it), or insecure: true if every machine that reaches them may use them"
        )
        top.note("keys", what)


def _is_address(text: str) -> bool:
    """True if the text has the form of a host's address: a unicast IPv4 address or a DNS name."""
    if is_ip(text):
        return not IPv4Address(text).is_unspecified and not IPv4Address(text).is_multicast
    is_number = re.fullmatch(r"[\d.]+", text, re.ASCII)  # an invalid IPv4 address: 10.0.0.300
    return bool(DNS_NAME.fullmatch(text)) and not is_number


def _is_port(text: str) -> bool:
    return bool(re.fullmatch(r"[1-9]\d{0,4}", text, re.ASCII)) and int(text) <= PORT_MAX
