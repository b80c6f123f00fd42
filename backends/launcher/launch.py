"""`mooncake serve`: starts the processes of one host in order, and stops them in reverse order.

The processes start in this order: the etcd member, the directory (block key -> storage nodes), the
storage nodes, the Tritons, the gateways (OpenAI's interface). The frontend's Triton serves the
models that clients call, and each worker folder has a Triton of its own. A plan (launch_plan.py)
names the processes of a host. The host is ready when every model is ready.

The launcher ends on SIGINT, SIGTERM or SIGHUP. It also ends when the etcd member, the directory, a
storage node or the frontend's Triton dies more often than its restart policy allows. A start fails
after ready_s_max. On a single machine, it also fails when a model does not load. Before the
launcher exits, it ends its processes and removes its files.

The hosts of a deployment start in any order. Each host waits until etcd has a quorum and a
directory leads, and reports the reason. No host waits for the models of another host.

Not here: checks of the machine (environment.py), one Triton (triton_process.py).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from backends import launch_secret
from backends.cluster.drain import move_requests
from backends.cluster.host_plan import EtcdMember, FrontendPlan, NodePlan, host_and_port, reached_at
from backends.cluster.manifests.firewall import FREE_PORTS
from backends.launcher import environment, gateways, launch_plan
from backends.launcher.deployment_watch import DeploymentState, DeploymentWatch, state
from backends.launcher.etcd_member import (
    MISSING,
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
from backends.launcher.renewal import ETCD, CertificateRenewal, HostTurn, turn_at
from backends.launcher.repository import ModelLoad, ModelState, WorkerFolders, running_settings
from backends.launcher.triton_arguments import (
    AdminKey,
    common_arguments,
    frontend_arguments,
    open_api_problems,
    stage,
    worker_arguments,
)
from backends.launcher.triton_process import (
    FRONTEND,
    PROMISED,
    Endpoints,
    Restart,
    Stubs,
    Triton,
    TritonSetup,
    WorkerTriton,
    all_states,
    end_orphans,
    restarts_of,
)
from backends.tenants import api_keys
from backends.tracing.export import ENDPOINT_VARIABLE
from mooncake_store.directory.election import endpoints_and_prefix
from mooncake_store.keys import folder as key_folder
from mooncake_store.keys.folder import Keys
from mooncake_store.keys.tls import certificate_problems
from mooncake_store.process import self_check
from mooncake_store.process.child_processes import ChildProcess, Command, RestartPolicy

TRITON_SHM_BYTES = 256 * 2**20  # space in /dev/shm for requests to all Python models of Tritons
STOP_S_MAX = 9.0  # limit in seconds of `stop` on a single machine, after the gateways have ended
FRONTEND_STOP_S = 5.0  # part of STOP_S_MAX for the frontend's Triton
OTHERS_STOP_S = 1.0  # part of STOP_S_MAX for the processes that end after the workers
GATEWAY_STOP_S = 4.0  # limit in seconds for the end of the gateways and their streams
FLEET_OTHERS_STOP_S = 4.0  # limit in seconds for nodes, directory and etcd of a deployment's host
WAIT_S = 0.5  # pause between two checks of the directory while the start waits for other hosts
REPORT_AGAIN_S = 15.0  # seconds after which the reason for which the start waits is printed again


class Launcher:
    """The processes of one `mooncake serve` and their files."""

    def __init__(
        self, options: ServeOptions | HostOptions, report: Callable[[str], None] = lambda line: None
    ) -> None:
        """`report` receives a line for each event while a deployment's host starts."""
        self.options = options
        self._report = report
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
        # The model processes of Triton accept only ASCII paths, in every locale.
        of_triton = self.state_dir if str(self.state_dir).isascii() else self.socket_dir
        self._backends = of_triton / f"backends-{plan.host}"
        self._worker_folders = WorkerFolders(
            self.repository, options.settings, [node.name for node in plan.storage_nodes]
        )
        self._worker_names: set[str] = set()
        self._triton_setup = TritonSetup(
            repository=self.repository,
            mirrors=of_triton / f"repository-{plan.host}",
            log_dir=self.log_dir,
            cwd=self.socket_dir,
            command_of=self._triton_command,
            # On a single machine, every worker gets a free port of this range. On a deployment's
            # host, a worker without a planned port gets one of FREE_PORTS, which firewalls open.
            listen=plan.listen,
            called=plan.address,
            ports=FREE_PORTS if plan.deployment else (environment.PORT_MIN, environment.PORT_MAX),
            log_bytes_max=options.observed.log_bytes_max,
            folders=self._worker_folders,
        )
        self.frontend: Triton | None = None
        self.workers: dict[str, WorkerTriton] = {}
        self._leaving: list[WorkerTriton] = []  # draining workers, which end or are started again
        self._stubs = Stubs()
        self._gateways: Gateways | None = None
        self._metrics: MetricsServer | None = None
        self._watch: DeploymentWatch | None = None

    @property
    def children(self) -> list[ChildProcess]:
        """All child processes except Tritons and gateways, in the order of their start."""
        first = [each for each in (self._etcd, self._directory) if each is not None]
        return [*first, *self._nodes]

    def start(self) -> None:
        """Start every part of the plan. Returns while models may still load. Raises
        EnvironmentProblem, ChildDied, KeysInvalid or OSError."""
        triton = environment.find_triton()
        options, plan = self.options, self.plan
        self._keys = key_folder.of_process()  # None if this host has no keys
        turn = turn_at(plan.directory_address, plan.host)
        self._renewal = CertificateRenewal(self._keys, turn)
        end_orphans(remove_leftovers())
        self._check(triton)
        environment.make_writable(self.log_dir, self._setting("--state-dir", "state_dir"))
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
        shutil.rmtree(self._triton_setup.mirrors, ignore_errors=True)
        PROMISED["clients"] = [port for _, port in fixed_ports(plan).values()]
        self._start_tritons()
        self._gateways = Gateways(plan, env, self._with_log)
        if plan.deployment:
            self._watch = DeploymentWatch(plan.directory_address, self._deployment)
        address = host_and_port(plan.metrics)
        try:
            self._metrics = MetricsServer(
                address, self._sources, self.states, self._serves_models, self.settings
            )
        except OSError as error:
            raise environment.EnvironmentProblem(
                f"metrics port {plan.metrics} cannot be used ({error.strerror}); choose another "
                f"with {self._setting('--metrics-port', 'metrics_port')}"
            ) from None
        self._gateways.wait_ready()

    def _etcd_child(self, member: EtcdMember, env: dict[str, str]) -> ChildProcess:
        data_dir = self.state_dir / f"etcd-{self.plan.host}"
        own = member.advertised_client_url.partition("//")[2]
        endpoints, _ = endpoints_and_prefix(self.plan.directory_address)
        others = [each for each in endpoints if each != own]
        is_replaced = replace_lost_member(member, data_dir, others)
        if is_replaced:
            self._report("this host's etcd member lost its data: it was replaced by a new member")
        arguments = etcd_command(member, data_dir, is_replaced, self._keys)

        def begun() -> Command:
            self._renewal.started(ETCD)
            return Command(arguments, env | etcd_environment())

        return self._with_log("etcd", begun)

    def _wait_for_directory(self) -> DeploymentState:
        """Wait until the directory answers, or with etcd the elected directory.

        By default `ready_s_max` is infinite here, because the other hosts may start much later.
        Raises EnvironmentProblem after ready_s_max, and ChildDied if a child process dies.
        """
        give_up_s = time.monotonic() + self.options.ready_s_max
        reported, reported_s = "", 0.0
        while not (now := state(self.plan.directory_address)).is_well:
            for child in self.children:
                child.check_alive()
            if time.monotonic() > give_up_s:
                raise environment.EnvironmentProblem(
                    f"not ready after {self.options.ready_s_max:.0f} s: {now.text}"
                )
            if now.text != reported or time.monotonic() - reported_s > REPORT_AGAIN_S:
                reported, reported_s = now.text, time.monotonic()
                self._report(f"waits: {reported}")
            time.sleep(WAIT_S)
        self._report(now.text)
        return now

    def _start_tritons(self) -> None:
        """Start all Tritons at once, because they need each other only when requests arrive."""
        self._worker_names = self._worker_folders.names()
        if self.plan.frontend is not None:
            self.frontend = self._frontend(self.plan.frontend)
            self.frontend.mirror.sync(is_first=True)
            self.frontend.start()
        for name in sorted(self._worker_names):
            self._add_worker(name)
            self.workers[name].mirror.sync(is_first=True)
            if self.workers[name].mirror.models():
                self.workers[name].start()

    def _frontend(self, plan: FrontendPlan) -> Triton:
        endpoints = Endpoints(plan.grpc, http=plan.http)
        return Triton(
            FRONTEND, self._triton_setup, endpoints, lambda name: name not in self._worker_names
        )

    def _add_worker(self, name: str) -> None:
        """Add the Triton of one worker folder. `supervise` or the caller starts it."""
        planned = {worker.model: worker for worker in self.plan.workers}.get(name)
        fixed = Endpoints(planned.listen_grpc, called_grpc=planned.grpc) if planned else None
        self.workers[name] = WorkerTriton(name, self._triton_setup, fixed)

    def _node_command(self, node: NodePlan) -> list[str]:
        segment = node.segment_path or str(self._files.path(node.name))
        return launch_plan.command_of_node(self.plan, node, segment, self.state_dir)

    def wait_ready(self) -> list[ModelState]:
        """Wait until every model is ready. Raises EnvironmentProblem after `ready_s_max`. On a
        single machine, it also raises the error with the message of a model that does not load."""
        if self.plan.deployment:
            return self._wait_ready_among_others()
        give_up_s = time.monotonic() + self.options.ready_s_max
        refusals: dict[str, None] = {}  # ordered set, because Triton repeats a refusal at a retry
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
            if refusals:  # the start has failed, so the conductor must stop waiting for workers
                self._files.mark_stopping()
            # A Triton answers after it has tried to load each of its models once.
            is_complete = all(answer is not None for _, answer in answers)
            if refusals and (is_complete or time.monotonic() > give_up_s):
                raise environment.EnvironmentProblem(
                    "these models did not load:\n" + "\n".join(refusals)
                )
            states = all_states(answers)
            if states and all(state.is_ready for state in states):
                return states
            self._check_time(give_up_s, states)
            time.sleep(0.1)

    def _wait_ready_among_others(self) -> list[ModelState]:
        """`wait_ready` for a deployment's host. A model that does not load does not end the start,
        because it may load after a change of another host or of its settings."""
        give_up_s = time.monotonic() + self.options.ready_s_max
        reported_s = time.monotonic()
        while True:
            for restart in self.supervise():
                self._report(restart.text)
            for load in self.news():
                if load.reason:
                    self._report(f"{load.model} does not load yet: {load.reason}")
            for change in self.deployment_news():
                self._report(change.text)
            states = self.states()
            if all(each.is_ready for each in states) and (states or not self._serves_models()):
                return states
            waiting = self._check_time(give_up_s, states)
            if time.monotonic() - reported_s > REPORT_AGAIN_S:
                reported_s = time.monotonic()
                hint = " (the conductor waits for workers)" if "conductor" in waiting else ""
                self._report(f"still loads: {waiting}{hint}")
            time.sleep(0.1)

    def _check_time(self, give_up_s: float, states: list[ModelState]) -> str:
        """The names of the models that are not ready, or "Triton" if there are no such models yet.
        Raises EnvironmentProblem after `give_up_s`."""
        waiting = ", ".join(each.name for each in states if not each.is_ready) or "Triton"
        if time.monotonic() > give_up_s:
            raise environment.EnvironmentProblem(
                f"not ready after {self.options.ready_s_max:.0f} s, still waiting for "
                f"{waiting}; see {self.log_dir}"
            )
        return waiting

    def supervise(self) -> list[Restart]:
        """Copy edits of models to the mirrors that Tritons poll, and restart processes that died.

        To be called several times per second. Other processes reconnect to a restarted process. KV
        stays in living storage nodes. Raises ChildDied if the etcd member, the directory, a storage
        node or the frontend's Triton has no restart left.
        """
        restarts = restarts_of(self.children)
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
        """Add a Triton for each new worker folder, and drain the Tritons of removed folders. A
        process with outdated certificates is restarted in its turn; a worker drains before."""
        self._worker_names = self._worker_folders.names()
        self._leaving = [worker for worker in self._leaving if not worker.drain(alive[worker])]
        gone = self.workers.keys() - self._worker_names
        renewable = (self.workers.keys() - gone) | ({ETCD} if self._etcd is not None else set())
        renewed = self._renewal.due(renewable, self._is_whole, self._serves)
        if renewed == ETCD and self._etcd is not None:
            self._etcd.terminate()  # SIGTERM, so that an etcd leader transfers its leadership
            self._etcd.finish(OTHERS_STOP_S)
            self._etcd.start_again()
        elif renewed:
            gone.add(renewed)  # a later call adds the worker again, because its folder exists
        for name in gone:
            self._leaving.append(self.workers.pop(name))
        busy = {worker.name for worker in self._leaving}
        for name in sorted(self._worker_names - self.workers.keys() - busy):
            self._add_worker(name)

    def _is_whole(self) -> bool:
        """True if all workers are ready, none drains, and the host's etcd member is healthy."""
        if self._leaving or self._worker_names - self.workers.keys():
            return False
        if self.plan.etcd is not None and not member_serves(self.plan.etcd):
            return False
        return all(self._serves(worker) for worker in self.workers)

    def _serves(self, worker: str) -> bool:
        states = self.workers[worker].states() or []
        return bool(states) and all(each.is_ready for each in states)

    def news(self) -> list[ModelLoad]:
        """Loads and refusals of models since the last call."""
        return [load for triton in self._tritons() for load in triton.take_loads()]

    def deployment_news(self) -> list[DeploymentState]:
        return self._watch.news() if self._watch is not None else []

    def states(self) -> list[ModelState]:
        """As `all_states`. Any thread may call this."""
        return all_states([(triton, triton.states()) for triton in self._tritons()])

    def settings(self) -> dict[str, object]:
        """The answer to GET /settings of the metrics port. Any thread may call this."""
        mirrors = [triton.mirror for triton in self._tritons()]
        return running_settings(
            self.plan, self.options.settings, self._worker_folders, mirrors, self._pids()
        )

    def _pids(self) -> dict[str, list[int]]:
        """Kind of a process -> PIDs of the running processes that this launcher started."""
        workers = [*list(self.workers.values()), *list(self._leaving)]
        gateways = self._gateways.children if self._gateways is not None else []
        found: dict[str, list[ChildProcess | Triton | None]] = {
            "workers": [*workers],
            "storage nodes": [*self._nodes],
            "frontend": [self.frontend],
            "directory": [self._directory],
            "etcd": [self._etcd],
            "gateways": [*gateways],
        }
        pids = {
            kind: [pid for each in processes if each is not None and (pid := each.pid) is not None]
            for kind, processes in found.items()
        }
        return {kind: each for kind, each in pids.items() if each} | {"launcher": [os.getpid()]}

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
        """End all processes and remove their files, in this order:

        1. The gateways and then the frontend's Triton, so that no more requests arrive from them.
        2. The workers' Tritons. On a deployment's host, requests of other frontends are first
           moved to other workers, because a Triton that takes too long is killed.
        3. Storage nodes, directory and etcd member. On a single machine they end together. On a
           deployment's host they end in this order, because each deregisters at the next one.
        """
        give_up_s = time.monotonic() + STOP_S_MAX
        self._files.mark_stopping()
        if self._metrics is not None:
            self._metrics.close()
        if self._watch is not None:
            self._watch.close()
        if self._gateways and self._gateways.children:
            self._end([*self._gateways.children], GATEWAY_STOP_S)
            give_up_s = time.monotonic() + STOP_S_MAX
        self._end([self.frontend.child if self.frontend else None], FRONTEND_STOP_S)
        workers = [*self.workers.values(), *self._leaving]
        if self.plan.deployment and workers:
            move_requests(
                self.plan.directory_address, {each.name for each in workers}, self._secret()
            )
        left_s = give_up_s - time.monotonic()
        self._end([each.child for each in workers], left_s - OTHERS_STOP_S)
        self._renewal.close()  # so that another host gets the turn (renewal.py)
        if self.plan.deployment:
            give_up_s = time.monotonic() + FLEET_OTHERS_STOP_S
            self._end([*self._nodes], give_up_s - time.monotonic() - 2.0)
            self._end([self._directory], give_up_s - time.monotonic() - 1.0)
        self._end([*self.children[::-1]], give_up_s - time.monotonic())
        self._admin_key.remove()
        self._files.remove()

    def _end(self, children: list[ChildProcess | None], within_s: float) -> None:
        """Send SIGTERM to all, wait for at most `within_s`, and then kill all process groups."""
        running = [child for child in children if child is not None]
        give_up_s = time.monotonic() + within_s
        for child in running:
            child.terminate()
        for child in running:
            child.finish(give_up_s - time.monotonic())

    @property
    def http_url(self) -> str:
        """The URL of Triton's HTTP port; "" on a host without a frontend."""
        frontend = self.plan.frontend
        return f"http://{reached_at(frontend.http, self.plan.address)}" if frontend else ""

    @property
    def openai_url(self) -> str:
        """The URL of OpenAI's interface; "" without a gateway."""
        return self._gateways.url if self._gateways is not None else ""

    @property
    def has_api_keys(self) -> bool:
        return bool(self._env.get(api_keys.VARIABLE))

    def _secret(self) -> str:
        """The secret of calls between processes. On a single machine, each call here makes one."""
        if not self.plan.deployment:
            return launch_secret.make_secret()
        if self._keys is not None:
            return self._keys.secret
        return launch_secret.insecure_secret(self.plan.deployment)

    def _serves_models(self) -> bool:
        """False on a host with only storage nodes, a directory or an etcd member."""
        return bool(self.plan.frontend or self._worker_names)

    def _setting(self, option: str, key: str) -> str:
        """The name of a setting for error messages: an option, or a key of the cluster file."""
        return f"{key} in the cluster file" if self.plan.deployment else option

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
            remedy = "run from the project's root, name one with --model-repository, or make one "
            remedy += "with `mooncake init FOLDER`"
            if plan.deployment:
                remedy = "`mooncake cluster render models` writes it"
            raise environment.EnvironmentProblem(
                f"there is no model repository at {self.repository}; {remedy}"
            )
        needed = plan.shm_bytes + TRITON_SHM_BYTES
        found = [] if plan.deployment else self._worker_folders.unreadable()
        found += open_api_problems(self.options.open_apis)
        env = {**os.environ, **plan.environment}
        found += self.options.observed.problems(env)
        found += api_keys.problems(self.options.api_keys, env)
        env |= api_keys.environment(self.options.api_keys, env)
        found += gateways.problems(plan, env)
        sources = ("dram in the cluster file", "in the cluster file") if plan.deployment else ()
        found += environment.problems(triton, fixed_ports(plan), needed, 500, *sources)
        if plan.etcd is not None and etcd_binary() is None:
            found.append(MISSING)
        if self._keys is not None:
            address = plan.address if plan.etcd is not None else ""
            found += certificate_problems(self._keys, address=address)
        if found:
            raise environment.EnvironmentProblem("\n" + "\n".join(f"  - {line}" for line in found))

    def _environment(self, triton: environment.TritonInstall) -> dict[str, str]:
        given = {**self.plan.environment, **self.options.observed.environment()}
        env = environment.process_environment(triton, given)
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
        """The command of a Triton's next process. Removes shared memory of the previous process."""
        part = f"triton{triton.number}-"  # a name could be the prefix of another name
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
        # A worker registers this address in the directory.
        return Command(arguments, self._env | {"MOONCAKE_GRPC": endpoints.called})
