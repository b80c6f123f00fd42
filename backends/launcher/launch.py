"""`mooncake serve`: starts what one host runs, in order, and stops it in reverse order.

The order is etcd's member, the directory, storage nodes, then the Tritons: one for the models that
clients call and one for each worker folder. The host is ready when each of its models is. A plan
(launch_plan.py) names the parts; on one machine all but etcd. When the launcher ends (Ctrl-C,
SIGTERM, a child that keeps dying, a model that does not load at the start), its processes end too,
and its files in /dev/shm and its sockets are removed.

Hosts of a deployment start in any order. Each waits, and logs that it waits, until etcd has a
quorum and a directory leads. No host waits for the models of another.

Not here: checks of the machine (environment.py), child processes (processes.py), files
(launch_files.py), one Triton (triton_process.py, triton_arguments.py), metrics (metrics_server.py).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from backends import launch_secret
from backends.cluster.drain import move_requests
from backends.cluster.host_plan import EtcdMember, NodePlan
from backends.cluster.manifests.doors import FREE_PORTS
from backends.launcher import admin_key, environment, gateways, launch_plan
from backends.launcher.admin_key import AdminKey
from backends.launcher.deployment_watch import DeploymentState, DeploymentWatch, state
from backends.launcher.etcd_member import (
    MISSING,
    MemberRefused,
    etcd_binary,
    etcd_command,
    etcd_environment,
    member_serves,
    replace_lost_member,
)
from backends.launcher.gateways import Gateways
from backends.launcher.launch_files import LaunchFiles, remove_leftovers
from backends.launcher.launch_plan import HostOptions, ServeOptions, fixed_ports
from backends.launcher.metrics_server import MetricsServer, MetricsSource
from backends.launcher.processes import ChildProcess, Command, RestartPolicy
from backends.launcher.renewal import ETCD, CertificateRenewal, HostTurn, turn_at
from backends.launcher.repository import (
    ModelLoad,
    ModelState,
    RepositoryMirror,
    WorkerFolders,
    running_settings,
)
from backends.launcher.triton_arguments import (
    common_arguments,
    frontend_arguments,
    stage,
    worker_arguments,
)
from backends.launcher.triton_process import (
    FRONTEND,
    PROMISED,
    AnyPort,
    Endpoints,
    Restart,
    Stubs,
    Triton,
    WorkerTriton,
    all_states,
    end_orphans,
)
from backends.tenants import api_keys
from backends.tracing.export import ENDPOINT_VARIABLE
from mooncake_store.directory.election import endpoints_and_prefix
from mooncake_store.keys import folder as key_folder
from mooncake_store.keys.folder import Keys, KeysInvalid
from mooncake_store.keys.tls import certificate_problems
from mooncake_store.process import self_check

TRITON_SHM_BYTES = 256 * 2**20  # what the stubs' request pools may grow to, all models together
STOP_S_MAX = 9.0  # of it at most so much for the frontend's Triton, so much after the workers':
FRONTEND_STOP_S, OTHERS_STOP_S = 5.0, 1.0
GATEWAY_STOP_S = 4.0  # before all that, where there is a gateway: for its streams
FLEET_OTHERS_STOP_S = 4.0  # one after the other: nodes, the directory, etcd's member
WAIT_S = 0.5  # between two looks at what other hosts do
OF_A_HOST = ("MOONCAKE_ADDRESS", "MOONCAKE_LISTEN", "MOONCAKE_PEERS")
SAY_AGAIN_S = 15.0  # that it still waits for the same


class Launcher:
    """The processes of one `mooncake serve` and what they leave on disk."""

    def __init__(
        self, options: ServeOptions | HostOptions, say: Callable[[str], None] = lambda line: None
    ) -> None:
        """`say` hears what the start waits for, where other hosts take part."""
        self.options = options
        self._say = say
        self._files = LaunchFiles()
        self.name = self._files.name
        self.socket_dir = self._files.socket_dir
        self.plan = plan = options.plan(self.socket_dir)
        self._keys: Keys | None = None
        self._renewal = CertificateRenewal(None, HostTurn("", ""))
        self._etcd: ChildProcess | None = None
        self._directory: ChildProcess | None = None
        self._nodes: list[ChildProcess] = []
        base = Path(plan.folder)
        self.state_dir = (base / plan.state_dir).resolve()
        self._admin_key = AdminKey(self.state_dir / f"admin-key-{plan.host}")
        self.log_dir = self.state_dir / f"logs-{plan.host}"
        self.repository = (base / plan.model_repository).resolve()
        # The Python in Triton's stubs knows ASCII paths only, whatever the locale is.
        of_triton = self.state_dir if str(self.state_dir).isascii() else self.socket_dir
        self._mirrors = of_triton / f"repository-{plan.host}"
        self._backends = of_triton / f"backends-{plan.host}"
        self._worker_folders = WorkerFolders(
            self.repository, options.settings, [node.name for node in plan.storage_nodes]
        )
        self._worker_names: set[str] = set()
        self._any_port = (
            AnyPort(plan.listen, plan.address, FREE_PORTS) if plan.deployment else AnyPort()
        )
        self.frontend: Triton | None = None
        self.workers: dict[str, WorkerTriton] = {}
        self._leaving: list[WorkerTriton] = []  # their folders are gone
        self._stubs = Stubs()
        self._gateways: Gateways | None = None
        self._metrics: MetricsServer | None = None
        self._watch: DeploymentWatch | None = None

    @property
    def children(self) -> list[ChildProcess]:
        """Besides the Tritons, in the order of their start."""
        first = [each for each in (self._etcd, self._directory) if each is not None]
        return [*first, *self._nodes]

    def start(self) -> None:
        """Start what the plan names; returns when all of it runs, though models still load."""
        triton = environment.find_triton()
        options, plan = self.options, self.plan
        self._keys = self._keys_of_host()
        turn = turn_at(plan.directory_address, plan.host)
        self._renewal = CertificateRenewal(self._keys, turn)
        end_orphans(remove_leftovers())
        self._check(triton)
        environment.make_writable(self.log_dir, "--state-dir")
        self._admin_key.write()
        self._env = env = self._environment(triton)
        checked = ["--self-check"] if options.is_self_checked else []
        if plan.etcd is not None:
            self._etcd = self._etcd_child(plan.etcd, env)
        if plan.directory is not None:
            command = launch_plan.command_of_directory(plan, *checked)
            self._directory = self._child("directory", command, env)
            if not plan.directory.etcd:
                self._directory.wait_for_line("ready", 20.0)
        if plan.deployment:
            self._deployment = self._wait_for_directory()
        for node in plan.storage_nodes:
            self._nodes.append(self._child(f"node-{node.name}", self._node_command(node), env))
        for child in self._nodes:
            child.wait_for_line("ready", 60.0 if not plan.deployment else options.ready_s_max)
        self._staged = stage(triton, self._backends)
        self._server = triton.server
        shutil.rmtree(self._mirrors, ignore_errors=True)
        PROMISED["clients"] = [port for _, port in fixed_ports(plan).values()]
        self._start_tritons()
        self._gateways = Gateways(plan, env, self._with_log)
        if plan.deployment:
            self._watch = DeploymentWatch(plan.directory_address, self._deployment)
        host, _, port = plan.metrics.rpartition(":")
        try:
            self._metrics = MetricsServer(
                (host, int(port)), self._sources, self.states, self._serves_models, self.settings
            )
        except OSError as error:
            raise environment.EnvironmentProblem(
                f"metrics port {plan.metrics} cannot be used "
                f"({error.strerror}); choose another with --metrics-port"
            ) from None
        self._gateways.wait_ready()

    def _etcd_child(self, member: EtcdMember, env: dict[str, str]) -> ChildProcess:
        command = Command(self._etcd_command(member), env | etcd_environment())

        def begun() -> Command:
            self._renewal.started(ETCD)
            return command

        return self._with_log("etcd", begun)

    def _etcd_command(self, member: EtcdMember) -> list[str]:
        data_dir = self.state_dir / f"etcd-{self.plan.host}"
        own = member.advertised_client_url.partition("//")[2]
        endpoints, _ = endpoints_and_prefix(self.plan.directory_address)
        others = [each for each in endpoints if each != own]
        try:
            is_replaced = replace_lost_member(member, data_dir, others)
        except MemberRefused as error:
            raise environment.EnvironmentProblem(str(error)) from None
        if is_replaced:
            self._say("the data of this host's member of etcd are lost: it takes part anew")
        return etcd_command(member, data_dir, is_replaced, self._keys)

    def _wait_for_directory(self) -> DeploymentState:
        """Until a directory answers; with etcd, until its members have elected one.

        The others' hosts may come much later, so this waits for ever, unless a child of ours ends.
        """
        give_up_s = time.monotonic() + self.options.ready_s_max
        said, said_s = "", 0.0
        while not (now := state(self.plan.directory_address)).is_well:
            for child in self.children:
                child.check_alive()
            if time.monotonic() > give_up_s:
                raise environment.EnvironmentProblem(
                    f"not ready after {self.options.ready_s_max:.0f} s: {now.said}"
                )
            if now.said != said or time.monotonic() - said_s > SAY_AGAIN_S:
                said, said_s = now.said, time.monotonic()
                self._say(f"waits: {said}")
            time.sleep(WAIT_S)
        self._say(now.said)
        return now

    def _start_tritons(self) -> None:
        """All at once: they need each other only when requests come."""
        self._worker_names = self._worker_folders.names()
        if self.plan.frontend is not None:
            self.frontend = self._frontend()
            self.frontend.mirror.sync(is_first=True)
            self.frontend.start()
        for name in sorted(self._worker_names):
            self._add_worker(name)
            self.workers[name].mirror.sync(is_first=True)
            if self.workers[name].mirror.models():
                self.workers[name].start()

    def _frontend(self) -> Triton:
        plan = self.plan.frontend
        assert plan is not None
        return Triton(
            FRONTEND,
            RepositoryMirror(
                self.repository,
                self._mirrors / FRONTEND,
                lambda name: name not in self._worker_names,
                self._worker_folders,
            ),
            self.log_dir / f"{FRONTEND}.log",
            self.socket_dir,
            self._triton_command,
            Endpoints(plan.grpc, http=plan.http),
            log_bytes_max=self.options.observed.log_bytes_max,
        )

    def _add_worker(self, name: str) -> None:
        """A folder that the plan does not name, because it was copied, gets any free port: among
        hosts one of those that their firewalls leave to each other."""
        planned = {worker.model: worker for worker in self.plan.workers}.get(name)
        fixed = Endpoints(planned.listen_grpc, called_grpc=planned.grpc) if planned else None
        self.workers[name] = WorkerTriton(
            name,
            self.repository,
            self._mirrors / name,
            self.log_dir / f"{name}.log",
            self.socket_dir,
            self._triton_command,
            fixed,
            self._any_port,
            self.options.observed.log_bytes_max,
            self._worker_folders,
        )

    def _node_command(self, node: NodePlan) -> list[str]:
        segment = node.segment_path or str(self._files.path(node.name))
        return launch_plan.command_of_node(self.plan, node, segment, self.state_dir)

    def wait_ready(self) -> list[ModelState]:
        """Until every model of the repository serves; raises with what the models said if not."""
        if self.plan.deployment:
            return self._wait_ready_among_others()
        give_up_s = time.monotonic() + self.options.ready_s_max
        refusals: dict[str, None] = {}  # in order, each once: Triton tries again and again
        while True:
            for child in self.children:
                child.check_alive()
            answers: list[tuple[Triton, list[ModelState] | None]] = []
            for triton in self._tritons():
                if problem := triton.supervise_start():
                    raise environment.EnvironmentProblem(problem)
                answers.append((triton, triton.states()))
                refusals |= {
                    f"{load.model}: {load.reason}": None
                    for load in triton.take_loads()
                    if load.reason
                }
            if refusals:  # this start ends: the conductor need not wait for workers any more
                self._files.say_stopping()
            # A Triton answers only after it tried each of its models once: all reasons are known.
            if refusals and all(answer is not None for _, answer in answers):
                raise environment.EnvironmentProblem(
                    "these models did not load:\n" + "\n".join(refusals)
                )
            states = all_states(answers)
            if states and all(state.is_ready for state in states):
                return states
            if time.monotonic() > give_up_s:
                waiting = ", ".join(state.name for state in states if not state.is_ready)
                raise environment.EnvironmentProblem(
                    f"not ready after {self.options.ready_s_max:.0f} s, still waiting for "
                    f"{waiting or 'Triton'}; see {self.log_dir}"
                )
            time.sleep(0.1)

    def _wait_ready_among_others(self) -> list[ModelState]:
        """The same where other hosts take part. What does not load may wait for one of them, or for
        an edit, so nothing ends the start but a child that does not stay up."""
        give_up_s = time.monotonic() + self.options.ready_s_max
        said_s = time.monotonic()
        while True:
            for restart in self.supervise():
                self._say(restart.said)
            for load in self.news():
                if load.reason:
                    self._say(f"{load.model} does not load yet: {load.reason}")
            for change in self.deployment_news():
                self._say(change.said)
            states = self.states()
            if all(each.is_ready for each in states) and (states or not self._serves_models()):
                return states
            waiting = ", ".join(each.name for each in states if not each.is_ready) or "Triton"
            if time.monotonic() > give_up_s:
                raise environment.EnvironmentProblem(
                    f"not ready after {self.options.ready_s_max:.0f} s, still waiting for "
                    f"{waiting}; see {self.log_dir}"
                )
            if time.monotonic() - said_s > SAY_AGAIN_S:
                said_s = time.monotonic()
                hint = " (which waits for workers of any host)" if "conductor" in waiting else ""
                self._say(f"still loads: {waiting}{hint}")
            time.sleep(0.1)

    def supervise(self) -> list[Restart]:
        """Call it often while serving: carries edits over, starts again what died.

        Whatever it is, the others find it again by themselves, and KV stays in nodes that live.
        ChildDied when something that all others need does not stay up.
        """
        restarts = [
            Restart(child.name, pause_s)
            for child in self.children
            if (pause_s := child.supervise()) is not None
        ]
        for child in self.children:
            child.bound_log()
        everyone = [*self._tritons(), *self._leaving]
        by_pid = self._stubs.models_alive(
            {triton.pid for triton in everyone if triton.pid is not None}
        )
        alive = {triton: by_pid.get(triton.pid or 0, set()) for triton in everyone}
        self._supervise_folders(alive)
        for triton in self._tritons():
            restarts += triton.supervise(alive.get(triton, set()))
        return [*restarts, *(self._gateways.supervise() if self._gateways else ())]

    def _supervise_folders(self, alive: dict[Triton, set[str]]) -> None:
        """A worker folder that was copied gets a Triton, one that was removed loses it."""
        self._worker_names = self._worker_folders.names()
        self._leaving = [worker for worker in self._leaving if not worker.drain(alive[worker])]
        gone = self.workers.keys() - self._worker_names
        renewable = (self.workers.keys() - gone) | ({ETCD} if self._etcd is not None else set())
        renewed = self._renewal.due(renewable, self._is_whole, self._serves)
        if renewed == ETCD and self._etcd is not None:
            self._etcd.terminate()  # so that it hands its lead over
            self._etcd.finish(OTHERS_STOP_S)
            self._etcd.start_again()
        elif renewed:
            gone.add(renewed)  # and its folder is found again once it has ended
        for name in gone:
            self._leaving.append(self.workers.pop(name))
        busy = {worker.name for worker in self._leaving}
        for name in sorted(self._worker_names - self.workers.keys() - busy):
            self._add_worker(name)

    def _is_whole(self) -> bool:
        """Does every worker of this host serve, and its member of etcd?"""
        if self._leaving or self._worker_names - self.workers.keys():
            return False
        if self.plan.etcd is not None and not member_serves(self.plan.etcd):
            return False
        return all(self._serves(worker) for worker in self.workers)

    def _serves(self, worker: str) -> bool:
        states = self.workers[worker].states() or []
        return bool(states) and all(each.is_ready for each in states)

    def news(self) -> list[ModelLoad]:
        """Loads and refusals since the last call."""
        return [load for triton in self._tritons() for load in triton.take_loads()]

    def deployment_news(self) -> list[DeploymentState]:
        """What changed of etcd and the directory since the last call."""
        return self._watch.news() if self._watch is not None else []

    def states(self) -> list[ModelState]:
        """Of every model; one whose Triton does not answer is not ready. From any thread."""
        return all_states([(triton, triton.states()) for triton in self._tritons()])

    def settings(self) -> dict[str, object]:
        """What is served, and what became of the newest edit of each model. From any thread."""
        mirrors = [triton.mirror for triton in self._tritons()]
        return running_settings(self.plan, self.options.settings, self._worker_folders, mirrors)

    def _tritons(self) -> list[Triton]:
        frontend = [self.frontend] if self.frontend is not None else []
        return [*frontend, *list(self.workers.values())]

    def _sources(self) -> list[MetricsSource]:
        return [
            MetricsSource(triton.name, triton.incarnation, triton.endpoints.metrics)
            for triton in [*self._tritons(), *list(self._leaving)]
            if triton.endpoints is not None and triton.pid is not None
        ] + (self._gateways.sources() if self._gateways else [])

    def stop(self) -> None:
        """End everything: first the Triton that clients call, so that nobody calls the workers'
        any more; then those, so that workers can leave the directory in order. What other hosts'
        frontends have there is moved first: a Triton whose requests take long is killed."""
        give_up_s = time.monotonic() + STOP_S_MAX
        self._files.say_stopping()
        if self._metrics is not None:
            self._metrics.close()
        if self._watch is not None:
            self._watch.close()
        if self._gateways and self._gateways.children:  # their streams end, then their frontend
            self._end([*self._gateways.children], GATEWAY_STOP_S)
            give_up_s = time.monotonic() + STOP_S_MAX
        first = [self.frontend] if self.frontend is not None else []
        self._end([each.child for each in first], FRONTEND_STOP_S)
        workers = [*self.workers.values(), *self._leaving]
        if self.plan.deployment and workers:
            move_requests(
                self.plan.directory_address, {each.name for each in workers}, self._secret()
            )
        left_s = give_up_s - time.monotonic()
        self._end([each.child for each in workers], left_s - OTHERS_STOP_S)
        self._renewal.close()  # another host may have its turn
        if self.plan.deployment:  # each says goodbye to the next
            give_up_s = time.monotonic() + FLEET_OTHERS_STOP_S
            self._end([*self._nodes], give_up_s - time.monotonic() - 2.0)
            self._end([self._directory], give_up_s - time.monotonic() - 1.0)
        self._end([*self.children[::-1]], give_up_s - time.monotonic())
        self._admin_key.remove()
        self._files.remove()

    def _end(self, children: list[ChildProcess | None], within_s: float) -> None:
        """Ask all at once, wait, kill what is left."""
        running = [child for child in children if child is not None]
        give_up_s = time.monotonic() + within_s
        for child in running:
            child.terminate()
        for child in running:
            child.finish(give_up_s - time.monotonic())

    @property
    def http_url(self) -> str:
        """Where clients call; "" on a host without a frontend."""
        if self.plan.frontend is None:
            return ""
        return f"http://{self.plan.frontend.http}".replace(
            "//0.0.0.0", f"//{self.plan.address}" if self.plan.deployment else "//0.0.0.0"
        )

    @property
    def openai_url(self) -> str:
        """ "" where there is no gateway."""
        return self._gateways.url if self._gateways is not None else ""

    @property
    def has_api_keys(self) -> bool:
        return bool(self._env.get(api_keys.VARIABLE))

    def _keys_of_host(self) -> Keys | None:
        """None where there are none."""
        try:
            return key_folder.of_process()
        except KeysInvalid as error:
            raise environment.EnvironmentProblem(str(error)) from None

    def _secret(self) -> str:
        """A new one for one machine; the hosts of a deployment have one in common."""
        if not self.plan.deployment:
            return launch_secret.make_secret()
        if self._keys is not None:
            return self._keys.secret
        return launch_secret.insecure_secret(self.plan.deployment)

    def _serves_models(self) -> bool:
        """A host may have storage nodes or a directory alone."""
        return bool(self.plan.frontend or self._worker_names)

    def _child(self, name: str, command: list[str], env: dict[str, str]) -> ChildProcess:
        return self._with_log(name, lambda: Command(command, env))

    def _with_log(
        self, name: str, command: Callable[[], Command], policy: RestartPolicy | None = None
    ) -> ChildProcess:
        return ChildProcess(
            name,
            command,
            self.log_dir / f"{name}.log",
            self.socket_dir,
            policy,
            log_bytes_max=self.options.observed.log_bytes_max,
        )

    def _check(self, triton: environment.TritonInstall) -> None:
        plan = self.plan
        if not self.repository.is_dir():
            remedy = (
                "`mooncake cluster render` makes it"
                if plan.deployment
                else (
                    "run from the project's root, name one with --model-repository, or lay one "
                    "down with `mooncake init FOLDER`"
                )
            )
            raise environment.EnvironmentProblem(
                f"there is no model repository at {self.repository}; {remedy}"
            )
        needed = plan.shm_bytes + TRITON_SHM_BYTES
        found = [] if plan.deployment else self._worker_folders.unreadable()
        found += admin_key.problems(self.options.open_apis)
        found += self.options.observed.problems(os.environ | plan.environment)
        found += api_keys.problems(self.options.api_keys, os.environ | plan.environment)
        env = os.environ | plan.environment
        env |= api_keys.environment(self.options.api_keys, env)
        found += gateways.problems(plan, env)
        said = ("dram in the cluster file", "in the cluster file") if plan.deployment else ()
        found += environment.problems(triton, fixed_ports(plan), needed, 500, *said)
        if plan.etcd is not None and etcd_binary() is None:
            found.append(MISSING)
        if self._keys is not None:
            asked_for = plan.address if plan.etcd is not None else ""
            found += certificate_problems(self._keys, address=asked_for)
        if found:
            raise environment.EnvironmentProblem("\n" + "\n".join(f"  - {line}" for line in found))

    def _environment(self, triton: environment.TritonInstall) -> dict[str, str]:
        env = dict(os.environ)
        for name in OF_A_HOST:  # set for another command, they are not meant for this launch
            env.pop(name, None)
        env |= self.plan.environment | self.options.observed.environment()
        # Folders where the linker looks anyway are left out: put first, they would hide what the
        # image put before them.
        folders = [environment.libpython_folder(), *triton.library_folders]
        libraries = [str(each) for each in folders if each not in environment.linker_folders()]
        if given := env.get("LD_LIBRARY_PATH"):
            libraries.append(given)
        env["LD_LIBRARY_PATH"] = ":".join(libraries)
        env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}"
        env |= environment.python_variables()
        # glibc gives each of many threads an arena of its own, whose free memory stays there.
        env.setdefault("MALLOC_ARENA_MAX", "2")
        env.pop("PYTHONHOME", None)
        env["MOONCAKE_DIRECTORY"] = self.plan.directory_address
        env["MOONCAKE_EVENTS"] = self.plan.events_address
        env["MOONCAKE_SOCKETS"] = str(self.socket_dir)
        env["MOONCAKE_STATE"] = str(self.state_dir)
        env[self_check.VARIABLE] = "1" if self.options.is_self_checked else "0"
        env[launch_secret.SECRET_VARIABLE] = self._secret()
        if self._keys is not None:
            env[key_folder.VARIABLE] = str(self._keys.folder)
        env["MOONCAKE_REPOSITORY"] = str(self.repository)
        env |= api_keys.environment(self.options.api_keys, env)
        return env

    def _triton_command(self, triton: Triton, endpoints: Endpoints) -> Command:
        """How an incarnation of a Triton is started; memory of the one before it is removed."""
        part = f"triton{triton.number}-"  # of a name, another could be the beginning
        self._files.remove_part(part)
        prefix = f"{self.name}-{part}"
        arguments = common_arguments(
            self._server, triton.mirror.target, self._staged, endpoints, prefix
        )
        if triton is self.frontend:
            options = self.options
            arguments += frontend_arguments(
                self._admin_key,
                options.open_apis,
                options.triton_args,
                is_traced=bool(self._env.get(ENDPOINT_VARIABLE)),
            )
        else:
            self._renewal.started(triton.name)
            arguments += worker_arguments(self._admin_key, self._keys)
        # Workers tell the directory where they are called.
        return Command(arguments, self._env | {"MOONCAKE_GRPC": endpoints.called})
