"""The deployment of a simulation: hosts, and the processes on them, each begun by the product's own
code and begun again by its launcher when it dies.

Host a: a directory, a storage node, a prefill and a decode worker, a frontend; host b likewise; c
has a third node, sometimes. etcd is elsewhere.

Not here: what befalls them (faults.py), who asks them (clients.py).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from backends.config_pbtxt import DecodeConfig, FrontendConfig, PrefillConfig
from backends.frontend.cluster_view import ClusterView
from backends.frontend.frontend import Frontend
from backends.frontend.token_streams import TokenStreams
from backends.workers.decode_worker import DecodeWorker
from backends.workers.prefill_worker import PrefillWorker
from backends.workers.protocol import open_outbox
from backends.workers.step_driver import WHOLE_BYTES_MAX, StepDecode, StepPrefill
from conductor.config import ConductorConfig
from mooncake_store.directory import __main__ as directory_main
from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.errors import StoreError
from mooncake_store.layout import memory_bytes_for
from mooncake_store.node import __main__ as node_main
from mooncake_store.node.node import NodeOptions
from tests.fuzz_serve import green
from tests.fuzz_serve.calls import GreenCalls, Triton, ended
from tests.fuzz_serve.engine import LAYOUT, PAGES, GreenEngine, GreenTokenizer
from tests.fuzz_serve.loop import Loop, Process
from tests.fuzz_serve.network import Network

DIRECTORY = "etcd://etcd:2379/mooncake/directory"
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
RESTART_S = 0.3, 3.0
TTL_S = 3
LEASE_S = 6.0
QUARANTINE_S = 8.0
CLOSE_S_MAX = 5.0  # for what a process has when it is asked to end


@dataclass
class Role:
    """One place for a process, which its launcher fills again and again."""

    name: str
    host: str
    main: Callable[[Process], None]
    process: Process
    starts: int = 0


@dataclass
class Shape:
    """What a seed chose of the deployment."""

    units: dict[str, int]  # slots of each node
    hosts: tuple[str, ...] = ("a", "b")
    step_s: float = 0.01
    token_s: float = 0.001
    policy: str = "adaptive"
    queue_requests_max: int = 8
    attempts_max: int = 3
    conductor: dict[str, Any] = field(default_factory=dict)


class Stop:
    """In place of the signals of a process, which ask it to end in good order."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._asked = green.Event()
        process.state["stop"] = self

    @property
    def is_set(self) -> bool:
        return self._asked.is_set()

    def listen(self) -> None: ...

    def forward_to(self, server: Any) -> None:
        """Called with a server that is about to serve."""
        self._process.state["server"] = server

    def raise_one(self) -> None:
        self._asked.set()
        if (server := self._process.state.get("server")) is not None:
            server.stop()

    def wait(self, seconds: float) -> bool:
        return self._asked.wait(seconds)


class Deployment:
    def __init__(self, world: Loop, network: Network, shape: Shape) -> None:
        self.world, self.network, self.shape = world, network, shape
        self.roles: dict[str, Role] = {}
        self.is_ending = False
        for host in shape.hosts:
            self._add(f"directory-{host}", host, self._directory)
        for name in shape.units:
            self._add(name, name[-1], self._node)
        for host in ("a", "b"):
            self._add(f"prefill_{host}", host, self._prefill)
            self._add(f"decode_{host}", host, self._decode)
            self._add(f"frontend-{host}", host, self._frontend)

    def _add(self, name: str, host: str, main: Callable[[Process], None]) -> None:
        self.roles[name] = Role(name, host, main, Process(self.world, name, host))
        self.roles[name].process.is_alive = False
        self.start(name)

    def leave(self, process: Process) -> None:
        """It is asked to end: what it has is finished, or handed back."""
        state = process.state
        if "stop" in state:
            state["stop"].raise_one()
        elif "worker" in state:
            green.spawn(process, lambda: self._end_worker(state["worker"]), "finalize")
        elif "frontend" in state:
            frontend, cluster = state.pop("frontend"), state["cluster"]
            green.spawn(process, lambda: self._end_frontend(frontend, cluster), "finalize")

    def _end_worker(self, worker: Any) -> None:
        worker.close(CLOSE_S_MAX)
        green.end_own_process()

    def _end_frontend(self, frontend: Frontend, cluster: ClusterView) -> None:
        frontend.close(CLOSE_S_MAX)
        cluster.close()
        green.end_own_process()

    def reload(self, process: Process) -> None:
        """Triton loads a model anew: the new process begins, and the old one ends what it has."""
        name = process.name.partition(".")[0]
        self.leave(process)
        self._begin(self.roles[name])

    def start(self, name: str) -> None:
        """Its launcher begins the process anew, unless it is there."""
        if not self.roles[name].process.is_alive:
            self._begin(self.roles[name])

    def _begin(self, role: Role) -> None:
        name = role.name
        role.starts += 1
        process = role.process = Process(self.world, f"{name}.{role.starts}", role.host)
        process.on_end.append(lambda: self._ended(role, process))
        process.state["environ"] = {
            "MOONCAKE_DIRECTORY": DIRECTORY,
            "MOONCAKE_EVENTS": "",
            "MOONCAKE_SOCKETS": "/sockets",
            "MOONCAKE_STATE": "/state",
            "MOONCAKE_INSECURE": "1",
            "MOONCAKE_GRPC": f"{role.host}:{name}",
        }
        self.world.note(f"{process.name} starts")
        green.spawn(process, lambda: self._main(role, process), "main")

    def _main(self, role: Role, process: Process) -> None:
        try:
            role.main(process)
        except (StoreError, OSError) as error:
            self.world.note(f"{process.name} cannot start: {type(error).__name__}")
        self.world.at(self.world.now_s, lambda _: process.kill())

    def _ended(self, role: Role, process: Process) -> None:
        self.world.note(f"{process.name} ended")
        if role.process is not process:
            return  # it was reloaded
        low, high = RESTART_S
        delay_s = low + (high - low) * self.world.rng.random()
        self.world.at(self.world.now_s + delay_s, lambda _: self.start(role.name))

    def alive(self, prefix: str = "") -> list[Process]:
        return [
            role.process
            for name, role in self.roles.items()
            if name.startswith(prefix) and role.process.is_alive
        ]

    # ---- the processes

    def _directory(self, process: Process) -> None:
        at = f"tcp://{ADDRESSES[process.host]}"
        options = Namespace(
            etcd=DIRECTORY,
            advertise="",
            address=f"{at}:7001",
            events=f"{at}:7002",
            ttl_s=TTL_S,
            self_check=False,
            metrics_port=0,
            metrics_address="",
        )
        config = DirectoryConfig(
            node_ttl_s=5.0,
            worker_ttl_s=5.0,
            quarantine_s=QUARANTINE_S,
            slow_start_s=1.0,
            events_max=256,
        )
        directory_main.serve_when_elected(options, config, Stop(process))  # type: ignore[arg-type]

    def _node(self, process: Process) -> None:
        name = process.name.partition(".")[0]
        units = self.shape.units[name]
        options = NodeOptions(
            node_id=name,
            segment_path=f"/dev/shm/{process.name}",
            segment_bytes=memory_bytes_for(units, LAYOUT.block_bytes, 4096),
            control=f"tcp://{ADDRESSES[process.host]}:0",
        )
        node_main.run(DIRECTORY, options, Stop(process), 1.0)  # type: ignore[arg-type]

    def _worker(self, process: Process, role: str, make: Callable[[str], Any]) -> None:
        name = process.name.partition(".")[0]
        triton = Triton(self.network, process, role)
        process.on_end.append(lambda: ended(triton))
        process.state["triton"] = triton
        triton.worker = process.state["worker"] = make(name)
        GreenCalls.tritons[process.state["environ"]["MOONCAKE_GRPC"]] = triton
        green.Event().wait()

    def _engine(self) -> Any:
        return GreenEngine(self.shape.step_s, self.shape.token_s)

    def _common(self, process: Process) -> dict[str, Any]:
        return {
            "block_tokens": LAYOUT.block_tokens,
            "kv_pages": PAGES,
            "lease_s": LEASE_S,
            "transfer_s_max": 2.0,
            "store_node": f"s{process.host}",
            "queue_requests_max": self.shape.queue_requests_max,
        }

    def _prefill(self, process: Process) -> None:
        config = PrefillConfig(chunk_tokens=8, **self._common(process))
        whole = WHOLE_BYTES_MAX if process.host == "b" else 0
        self._worker(
            process,
            "prefill",
            lambda name: PrefillWorker(name, config, "", StepPrefill(self._engine(), whole)),
        )

    def _decode(self, process: Process) -> None:
        config = DecodeConfig(slots=4, **self._common(process))
        self._worker(
            process,
            "decode",
            lambda name: DecodeWorker(name, config, "", StepDecode(self._engine())),
        )

    def _frontend(self, process: Process) -> None:
        shape = self.shape
        deciding = ConductorConfig(
            policy=shape.policy,
            hot_hits_per_s=0.2,
            hot_half_life_s=10.0,
            request_s_max=30.0,
            slow_start_s=2.0,
            failed_mark_s=3.0,
            **shape.conductor,
        )
        cluster = ClusterView(deciding, DIRECTORY, "")
        streams = TokenStreams(f"ipc:///sockets/{process.name}", 500.0)
        frontend = Frontend(
            FrontendConfig(requests_max=16, cancel_poll_s=0.8, attempts_max=shape.attempts_max),
            GreenTokenizer(),
            cluster,
            GreenCalls(),
            streams,
            open_outbox(),  # type: ignore[arg-type]
        )
        process.state["cluster"], process.state["frontend"] = cluster, frontend
        green.Event().wait()
