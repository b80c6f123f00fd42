"""`mooncake serve`: parses its options, then starts, supervises and stops a launch."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from backends.cluster.deployment import ClusterFileInvalid, Deployment, is_loopback
from backends.cluster.host_plan import HostPlan, host_plan, pool_host_plan
from backends.errors import ConfigError
from backends.launcher.environment import EnvironmentProblem
from backends.launcher.launch import Launcher
from backends.launcher.launch_plan import GatewayOptions, HostOptions, ObserveOptions, ServeOptions
from backends.launcher.repository import WorkerFolders
from backends.launcher.served_checkpoint import default_checkpoint as default_checkpoint_of
from backends.launcher.served_checkpoint import dtype_of, named_checkpoint
from backends.model_settings.serve_settings import ServeSettings
from backends.models import ModelError, shown_progress
from mooncake_store.cli.arguments import parse_bytes, parse_nodes
from mooncake_store.cli.serving import UNIT_BYTES
from mooncake_store.keys import folder
from mooncake_store.keys.folder import KeysInvalid
from mooncake_store.process.child_processes import (
    ChildDied,
    Stopped,
    ignore_signals,
    signals_as_exceptions,
)

console = Console(stderr=True, highlight=False)
# Prompts of the first request. Triton's interface applies no chat template.
QUESTION, BEGINNING = "What is the capital of France?", "The capital of France is"
ELASTIC_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
STORE_BYTES = "768M"  # default of --store-bytes
WORKERS_MAX = 64  # limit of the workers of one role

# Options that are rejected with --cluster, because the cluster file defines them for each host.
OF_ONE_MACHINE = {"checkpoint", "engine", "dtype", "device", "prefill", "decode"} | (
    ServeOptions.__annotations__.keys() - {"model_repository", "address", "ready_s_max"}
)
ReadySMax = Annotated[
    float | None,
    typer.Option(help="Limit of the start in seconds; default 300, or none with --cluster."),
]
OpenApis = Annotated[
    list[str] | None,
    typer.Option(
        help="An API of Triton that needs no admin key: shared-memory (from Triton 2.69 on also "
        "--triton-arg=--allow-client-shm=true), model-repository, trace or logging; repeatable."
    ),
]
ApiKeysFile = Annotated[
    Path | None,
    typer.Option(
        help="File of tenants and their API keys (`mooncake tenants`); default: MOONCAKE_API_KEYS. "
        "Without a file, clients name their own tenant."
    ),
]
TritonArguments = Annotated[
    list[str] | None,
    typer.Option(help="An argument to pass on to the frontend's tritonserver; repeatable."),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option(help="A cluster file, which defines all ports and sizes. Serve its host --host."),
]
LogFormat = Annotated[
    Literal["text", "json"] | None,
    typer.Option(help="Log format of all processes: text (default) or json, one object per line."),
]
LogBytes = Annotated[
    str, typer.Option(help="Size limit of each process's log, and of its older part (NAME.1).")
]
OpenaiPort = Annotated[
    int, typer.Option(min=0, max=65535, help="Port of OpenAI's interface; 0: do not serve it.")
]
OpenaiWorkers = Annotated[int, typer.Option(min=1, max=64, help="Processes of --openai-port.")]
OpenaiCertificate = Annotated[
    Path | None, typer.Option(help="PEM file: OpenAI's interface over HTTPS.")
]
OpenaiPrivateKey = Annotated[Path | None, typer.Option(help="PEM file of the TLS key.")]
AllowedOrigins = Annotated[
    str,
    typer.Option(
        help="Origins of web pages whose scripts may call OpenAI's interface, like "
        "http://localhost:3000; comma separated. * with --api-keys only. Default: none."
    ),
]
OtlpEndpoint = Annotated[
    str,
    typer.Option(help="Trace requests to this OpenTelemetry collector (gRPC): http://HOST:4317."),
]
HostName = Annotated[str, typer.Option(help="Name of this host in the cluster file.")]
ModelRepository = Annotated[
    Path, typer.Option(help="Folder of Triton models; edit its config.pbtxt files freely.")
]
Address = Annotated[str, typer.Option(help="Address to listen on.")]
HttpPort = Annotated[int, typer.Option(help="KServe HTTP port.")]
GrpcPort = Annotated[int, typer.Option(help="KServe gRPC port.")]
MetricsPort = Annotated[int, typer.Option(help="Prometheus port.")]
MetricsAddress = Annotated[
    str, typer.Option(help="Address of the metrics port; other hosts cannot reach the default.")
]
StorageNodes = Annotated[str, typer.Option(help="Storage nodes, comma separated.")]
StoreBytes = Annotated[
    str, typer.Option(help="Memory of each storage node in /dev/shm, like 512M or 4G.")
]
SsdBytes = Annotated[
    str, typer.Option(help="SSD of each storage node for cold blocks, like 20G; 0: none.")
]
SsdPath = Annotated[
    Path | None, typer.Option(help="Folder for these blocks (default: ssd in --state-dir).")
]
StateDir = Annotated[
    Path, typer.Option(help="Logs, staged backends and this machine's measured speeds.")
]
CheckpointOption = Annotated[
    str,
    typer.Option(
        help="Checkpoint of all models: a Hugging Face folder, or a name of `mooncake model list`, "
        "which is fetched if it is absent. Overrides config.pbtxt."
    ),
]
DefaultCheckpoint = Annotated[
    str,
    typer.Option(
        help="Checkpoint if neither --checkpoint nor config.pbtxt names one. If it cannot be "
        "fetched, the demo is served."
    ),
]
Engine = Annotated[
    Literal["torch", "tensorrt_llm", "vllm"] | None,
    typer.Option(
        help="Engine of all workers. Default: that of config.pbtxt. vllm: see `make vllm`."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Dtype of weights, and of KV without kv_dtype: float32, bfloat16; with another engine "
        "than torch also float16. Default: bfloat16 if --checkpoint says so in its config.json, "
        "otherwise that of config.pbtxt."
    ),
]
Device = Annotated[str, typer.Option(help="Device of all workers: cpu, cuda or cuda:N.")]
Prefill = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=WORKERS_MAX,
        help="Number of prefill workers. They use the first prefill folders of the repository. "
        "Further workers are made from the first folder.",
    ),
]
Decode = Annotated[
    int | None, typer.Option(min=1, max=WORKERS_MAX, help="Number of decode workers; as --prefill.")
]
PoolName = Annotated[
    str,
    typer.Option(
        help="Serve one worker of this elastic pool on a host that is not in the file. --host and "
        "--address are its name and address."
    ),
]


def serve(
    context: typer.Context,
    model_repository: ModelRepository = Path("model_repository"),
    address: Address = "127.0.0.1",
    http_port: HttpPort = 8000,
    grpc_port: GrpcPort = 8001,
    metrics_port: MetricsPort = 8002,
    metrics_address: MetricsAddress = "127.0.0.1",
    nodes: StorageNodes = "s0,s1",
    store_bytes: StoreBytes = STORE_BYTES,
    ssd_bytes: SsdBytes = "0",
    ssd_path: SsdPath = None,
    state_dir: StateDir = Path(".mooncake"),
    checkpoint: CheckpointOption = "",
    default_checkpoint: DefaultCheckpoint = "",
    engine: Engine = None,
    dtype: Dtype = "",
    device: Device = "",
    prefill: Prefill = None,
    decode: Decode = None,
    ready_s_max: ReadySMax = None,
    self_check: Annotated[
        bool, typer.Option(help="Check invariants of every process each second; exit on a failure.")
    ] = False,
    open_api: OpenApis = None,
    api_keys: ApiKeysFile = None,
    triton_arg: TritonArguments = None,
    openai_port: OpenaiPort = 0,
    openai_workers: OpenaiWorkers = 1,
    openai_certificate: OpenaiCertificate = None,
    openai_private_key: OpenaiPrivateKey = None,
    allowed_origins: AllowedOrigins = "",
    log_format: LogFormat = None,
    log_bytes: LogBytes = "64M",
    otlp_endpoint: OtlpEndpoint = "",
    cluster: ClusterFile = None,
    host: HostName = "",
    pool: PoolName = "",
) -> None:
    """Run directory, storage nodes and Tritons on this machine until Ctrl-C. With --cluster, run
    the processes that the file assigns to --host."""
    more: dict[str, Any] = {
        "is_self_checked": self_check,
        "open_apis": tuple(open_api or ()),
        "triton_args": tuple(triton_arg or ()),
        "api_keys": api_keys,
        "observed": ObserveOptions(
            log_format or "", parse_bytes(log_bytes, "--log-bytes"), otlp_endpoint
        ),
        "gateway": GatewayOptions(
            openai_port, openai_workers, openai_certificate, openai_private_key, allowed_origins
        ),
    }
    if ready_s_max is not None:
        more["ready_s_max"] = ready_s_max
    if cluster is not None:
        refuse_options_of_one_machine(context, is_elastic=bool(pool))
        plan = plan_in_file(cluster, host, pool, address, model_repository)
        if openai_port and plan.frontend is None:
            refuse(
                "--openai-port needs a frontend, and this host has none: give the option to a host "
                "with a frontend"
            )
        sys.exit(serve_until_stopped(HostOptions(plan, **more)))
    if host or pool:
        refuse("--host and --pool choose a part of a cluster file: name the file with --cluster")
    named = parse_nodes(nodes)
    checkpoint = served_checkpoint(checkpoint, default_checkpoint, model_repository)
    counts = {"prefill": prefill, "decode": decode}
    workers = {role: count for role, count in counts.items() if count is not None}
    settings = ServeSettings(
        checkpoint=checkpoint,
        engine=engine or "",
        dtype=dtype or dtype_of(checkpoint, model_repository),
        device=device,
        workers=workers,
    )
    if not settings.is_empty:
        refuse_wrong_settings(model_repository, settings, named)
    sys.exit(
        serve_until_stopped(
            ServeOptions(
                settings=settings,
                model_repository=model_repository,
                address=address,
                http_port=http_port,
                grpc_port=grpc_port,
                metrics_port=metrics_port,
                metrics_address=metrics_address,
                nodes=named,
                store_bytes=parse_bytes(store_bytes, "--store-bytes", UNIT_BYTES),
                ssd_bytes=parse_bytes(ssd_bytes, "--ssd-bytes"),
                ssd_path=ssd_path,
                state_dir=state_dir,
                **more,
            )
        )
    )


def refuse_options_of_one_machine(context: typer.Context, is_elastic: bool) -> None:
    """Reject options that the cluster file defines. --address is accepted for an elastic host."""
    names = OF_ONE_MACHINE if is_elastic else OF_ONE_MACHINE | {"address"}
    given = [
        f"--{name.replace('_', '-')}"
        for name in context.params
        if name in names
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    ]
    if given:
        refuse(f"{', '.join(given)}: with --cluster the file defines this; change it there")


def served_checkpoint(checkpoint: str, default: str, repository: Path) -> str:
    """The folder of --checkpoint, or of --default-checkpoint; "" if config.pbtxt decides. Exits if
    --checkpoint cannot be had."""
    with signals_as_exceptions(), shown_progress(console) as progress:
        try:
            if default and not checkpoint:
                return default_checkpoint_of(default, repository, progress, print_line)
            return named_checkpoint(checkpoint, progress)
        except (ConfigError, ModelError) as error:
            refuse(str(error))
        except Stopped as stopped:
            console.print(f"{stopped}: nothing was started")
            raise SystemExit(0) from None


def print_line(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def refuse_wrong_settings(repository: Path, settings: ServeSettings, nodes: Sequence[str]) -> None:
    """Exit with a list of all mistakes if the repository and these options do not fit."""
    # Imported here, because loading the parameters of all engines takes time.
    from backends.model_settings.checkpoint_facts import facts_beside
    from backends.model_settings.repository_check import check_repository
    from backends.model_settings.repository_files import read_texts, versionless
    from backends.model_settings.serve_settings import made_problems

    try:
        texts = read_texts(repository)
        folders = WorkerFolders(repository, settings, nodes)
    except ConfigError as error:
        refuse(str(error))
    sources = {model: model for model in texts if model not in folders.left_out} | folders.made
    served = {model: folders.rendered(model, texts[source]) for model, source in sources.items()}
    found = made_problems(served, folders.made)
    lacking = versionless(repository, {*sources.values()})
    found += check_repository(served, facts_beside(repository), nodes, lacking).mistakes
    if found:
        refuse(
            "these options and the model repository do not fit:\n"
            + "\n".join(f"  - {line}" for line in found)
        )


def refuse(reason: str) -> NoReturn:
    print_refusal(reason)
    raise SystemExit(2)


def print_refusal(reason: str) -> None:
    console.print(f"[bold red]cannot serve[/]: {escape(reason)}", markup=True, soft_wrap=True)


def plan_in_file(
    path: Path, host: str, pool: str, address: str, model_repository: Path
) -> HostPlan:
    """The plan of this host from the cluster file `path`. Writes the host's model repository, and
    sets the host's environment variables in this process. Exits if file or options are wrong."""
    # Imported here, because loading the parameters of all engines takes time.
    from backends.cluster.cluster_file import load
    from backends.cluster.model_rendering import TemplateMissing
    from backends.cluster.rendered_folder import RenderedFolder

    try:
        deployment = load(path, model_repository)
    except ClusterFileInvalid as error:
        refuse(str(error))
    if pool:
        refuse_unfit_elastic_host(deployment, host, address)
    pools = [each.name for each in deployment.elastic_pools]
    if pool and pool not in pools:
        refuse(f"{path} has no elastic pool {pool!r}: --pool takes one of {', '.join(pools)}")
    if not pool and host not in deployment.hosts:
        hosts = ", ".join(deployment.hosts)
        refuse(f"{path} has no host {host!r}: --host takes one of {hosts}")
    plan = pool_host_plan(deployment, pool, host, address) if pool else host_plan(deployment, host)
    if plan.is_idle:
        refuse(f"{path} gives host {host!r} nothing to run")
    try:
        RenderedFolder(deployment, plan, model_repository).write(keeps_edits=True)
    except TemplateMissing as error:
        refuse(str(error))
    plan = with_own_keys(plan, pool or host)
    os.environ.update(plan.environment)  # because this process also calls etcd and the directory
    return plan


def refuse_unfit_elastic_host(deployment: Deployment, host: str, address: str) -> None:
    """Exit if other hosts cannot use this name or address for the elastic host."""
    taken = {*deployment.hosts, *(node.name for node in deployment.storage_nodes)}
    if not ELASTIC_NAME.fullmatch(host):
        refuse(f"--host {host!r}: an elastic host needs a name of a-z, 0-9 and -, like a pod")
    if host in taken:
        refuse(f"--host {host!r} is in the cluster file: an elastic host needs another name")
    others = [each.address for each in deployment.hosts.values()]
    if ":" in address:
        refuse(f"--address {address}: use an IPv4 address: no process of a launch listens on IPv6")
    if is_loopback(address) and not all(is_loopback(other) for other in others):
        refuse(f"--address {address}: give one at which the other hosts reach this host")


def with_own_keys(plan: HostPlan, owner: str) -> HostPlan:
    """The plan with the keys folder of `owner`, a host or a pool. Exits if the keys do not fit."""
    if not (given := plan.environment.get(folder.VARIABLE)):
        return plan
    own = folder.folder_of_host(Path(given), owner).resolve()
    if found := folder.problems(own):
        refuse("\n".join(found))
    return replace(plan, environment={**plan.environment, folder.VARIABLE: str(own)})


def serve_until_stopped(options: ServeOptions | HostOptions) -> int:
    """Run a launch. Return 0 after a signal stopped it, or 1 after it failed. Exit with status 2 if
    the launch cannot begin."""
    try:
        launcher = Launcher(options, print_line)
    except EnvironmentProblem as problem:
        refuse(str(problem))
    except OSError as error:
        refuse(file_problem(error))
    status = 0
    with signals_as_exceptions():
        try:
            run_until_stopped(launcher)
        except Stopped as stopped:
            console.print(f"{stopped}: stopping ...")
        except (EnvironmentProblem, ChildDied, KeysInvalid, OSError) as problem:
            ignore_signals()  # so that Ctrl-C interrupts neither the message nor the clean-up
            print_refusal(file_problem(problem) if isinstance(problem, OSError) else str(problem))
            status = 1
        finally:
            ignore_signals()
            launcher.stop()
    return status


def file_problem(error: OSError) -> str:
    """The message for an error of a file, which is mostly a full disk or a missing permission."""
    if not error.filename:
        return f"{error.strerror or error}: check the free space and permissions of --state-dir"
    return f"{error.filename}: {error.strerror}; correct this, or choose another --state-dir"


def first_request(http_url: str, openai_url: str, has_keys: bool) -> str:
    """A shell command by which the operator can send a request."""
    if not openai_url:
        body = f'{{"text_input": "{BEGINNING}", "max_tokens": 32, "stream": true}}'
        return f"curl -sN {http_url}/v2/models/conductor/generate_stream -d '{body}'"
    key = ' -H "Authorization: Bearer $KEY"' if has_keys else ""
    body = (
        f'{{"messages": [{{"role": "user", "content": "{QUESTION}"}}], "max_tokens": 32, '
        '"temperature": 0, "stream": true}'
    )
    return f"curl -sN {openai_url}/v1/chat/completions{key} -d '{body}'"


def run_until_stopped(launcher: Launcher) -> None:
    """Start the launch, print the command of a first request, and supervise until an exception."""
    started_s = time.monotonic()
    if not console.is_terminal:  # a terminal shows `console.status` instead
        console.print(f"starting ... (logs: {launcher.log_dir})", soft_wrap=True)
    with console.status("starting directory, storage nodes and Tritons ..."):
        launcher.start()
    with console.status(f"loading models (logs: {launcher.log_dir}) ..."):
        states = launcher.wait_ready()
    seconds = time.monotonic() - started_s
    console.print(
        f"ready after {seconds:.1f} s: {', '.join(state.name for state in states)}", soft_wrap=True
    )
    if launcher.http_url:
        console.print("try:", style="bold")
        request = first_request(launcher.http_url, launcher.openai_url, launcher.has_api_keys)
        console.print(f"  {request}", markup=False, soft_wrap=True)
    if launcher.openai_url:
        console.print(f"  OpenAI's interface: {launcher.openai_url}/v1", soft_wrap=True)
        console.print(f"  status page, playground: {launcher.openai_url}/", soft_wrap=True)
    launcher.news()  # discards news from before the launch was ready
    while True:
        for restart in launcher.supervise():
            console.print(f"[bold yellow]{escape(restart.text)}[/]")
        for change in launcher.deployment_news():
            style = "green" if change.is_well else "bold yellow"
            console.print(f"[{style}]{escape(change.text)}[/]", soft_wrap=True)
        for load in launcher.news():
            if load.reason:
                what = "Triton does not serve" if load.is_new else "Triton kept the old settings of"
                console.print(f"[bold yellow]{what} {escape(load.model)}[/]:")
                console.print(load.reason, markup=False, soft_wrap=True)
            else:
                console.print(f"{load.model} serves with the settings in its config.pbtxt")
        time.sleep(0.3)
