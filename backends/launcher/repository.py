"""The model repository as a Triton has it: the folder that it polls, what it says of the models.

**The mirror.** Each Triton of the launcher serves a part of the operator's repository
(triton_process.py), so each polls a mirror of that part: everything is a link to the operator's
files except config.pbtxt, which is a copy. Triton loads a model anew only when its config.pbtxt
really changes, and it never restarts a model's process that died; such a model gets a new
*incarnation*, one more parameter at the end of its copy, and Triton starts it again. The operator's
files are only read. A folder is taken over when it has not changed for a moment: editors and copies
work in steps, and Triton gives up on a model whose version folder is not there yet.

**What Triton says**, in words an operator can use: which models are ready, and why one is not
(Triton's reason without its boilerplate).

Not here: starting Triton, and noticing that a model's process died (triton_process.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from backends.cluster.host_plan import HostPlan
from backends.direct_http import DIRECTLY
from backends.model_settings.repository_files import digest
from backends.model_settings.running_system import (
    LOADED,
    PENDING,
    REFUSED,
    EditState,
    RunningSettings,
)
from backends.model_settings.serve_settings import (
    NO_SETTINGS,
    ServedWorkers,
    ServeSettings,
    rendered,
    served_workers,
)

SETTLED_S = 0.15
BYTES = "surrogateescape"  # a comment may be in any encoding
# Names with a leading underscore are the launcher's, not the operator's.
INCARNATION_PARAMETER = "_incarnation"
WORKER_BACKENDS = ("prefill", "decode")
COMMENT = re.compile(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|\#[^\n]*""", re.VERBOSE
)
BACKEND = re.compile(r'^\s*(?:backend|platform)\s*:\s*"([^"]*)"', re.MULTILINE)


def backend_of(model: Path) -> str | None:
    """As a model folder's config.pbtxt names it; None when there is none (yet)."""
    try:
        found = BACKEND.search((model / "config.pbtxt").read_text(errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


class WorkerFolders:
    """Which folders of the operator's repository are prefill or decode workers, and which workers
    are made of others, because options of the launch ask for more (serve_settings.py)."""

    def __init__(
        self, repository: Path, settings: ServeSettings = NO_SETTINGS, nodes: Sequence[str] = ()
    ) -> None:
        """ConfigError where a role has no worker to make others from."""
        self._repository = repository
        self._settings, self._nodes = settings, nodes
        self._names: set[str] = set()
        self._served = ServedWorkers()
        self._made: dict[str, str] = {}  # worker -> the folder that it is made of now
        if settings.workers and repository.is_dir():
            self._served = served_workers(settings, self._backends())
            self.names()

    @property
    def left_out(self) -> frozenset[str]:
        """Folders of workers beyond the number that was asked for."""
        return self._served.left_out

    @property
    def made(self) -> dict[str, str]:
        """Workers without a folder, and the folder that each is made of."""
        return self._made

    def rendered(self, model: str, text: str) -> str:
        """What Triton is to see of a model with this config.pbtxt."""
        number = self._served.made[model][1] if model in self._made else None
        return rendered(self._settings, text, number, self._nodes)

    def _backends(self) -> dict[str, str]:
        found = {path.name: backend_of(path)
                 for path in self._repository.iterdir() if path.is_dir()}  # fmt: skip
        return {name: backend for name, backend in found.items() if backend in WORKER_BACKENDS}

    def names(self) -> set[str]:
        """A folder whose config.pbtxt says nothing at the moment is what it was."""
        found = {path.name: backend_of(path)
                 for path in self._repository.iterdir() if path.is_dir()}  # fmt: skip
        self._names = {
            name for name, backend in found.items()
            if backend in WORKER_BACKENDS or (backend is None and name in self._names)
        } - self.left_out  # fmt: skip
        if self._served.made:
            workers = {name: backend or "" for name, backend in found.items()
                       if name in self._names}  # fmt: skip
            self._made = {
                name: source for name in self._served.made
                if name not in workers and (source := self._served.source_of(name, workers))
            }  # fmt: skip
            self._names |= self._made.keys()
        return self._names


class EditStates:
    """What became of the newest config.pbtxt of each model. Read from any thread."""

    def __init__(self) -> None:
        self._now: dict[str, EditState] = {}
        self._mirrored: dict[str, str] = {}  # model -> what the copy means
        self._loaded: dict[str, str] = {}

    def mirrored(self, model: str, digest: str, text: str) -> None:
        """Triton is going to see this text, made of the operator's file with this digest."""
        meaning = without_comments(text)
        before = self._now.get(model)
        if before is not None and meaning == self._mirrored[model]:
            self._now[model] = replace(before, digest=digest)
            return
        self._mirrored[model] = meaning
        # Triton loads nothing when a refused edit is taken back.
        outcome = LOADED if meaning == self._loaded.get(model) else PENDING
        self._now[model] = EditState(digest, outcome)

    def heard(self, load: ModelLoad) -> None:
        before = self._now.get(load.model)
        if before is None:
            return
        outcome = REFUSED if load.reason else LOADED
        self._now[load.model] = EditState(before.digest, outcome, load.reason)
        if not load.reason:
            self._loaded[load.model] = self._mirrored[load.model]

    def removed(self, model: str) -> None:
        for each in (self._now, self._mirrored, self._loaded):
            each.pop(model, None)

    def digest_of(self, model: str) -> str:
        state = self._now.get(model)
        return state.digest if state is not None else ""

    def states(self) -> dict[str, EditState]:
        return dict(self._now)


def without_comments(text: str) -> str:
    """What Triton compares before it loads a model anew, and so not the blank space either."""
    kept = COMMENT.sub(lambda match: match["string"] or "", text)
    return " ".join(kept.split())


class RepositoryMirror:
    def __init__(
        self, source: Path, target: Path, wants: Callable[[str], bool],
        workers: WorkerFolders | None = None,
    ) -> None:  # fmt: skip
        """`wants`: is this model part of the mirror? `workers`: those that are made of others, and
        how models are rendered; without, all are as their files say."""
        self.source = source.resolve()
        self.target = target
        self.edits = EditStates()
        self._wants = wants
        self._workers = workers
        self._incarnations: dict[str, int] = {}
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)

    def revive(self, model: str) -> None:
        """Let Triton start this model once more, with the same settings."""
        self._incarnations[model] = self._incarnations.get(model, 0) + 1

    def models(self) -> set[str]:
        """Those that Triton is to serve."""
        return {path.parent.name for path in self.target.glob("*/config.pbtxt")}

    def config(self, model: str) -> str:
        """The config.pbtxt that Triton sees; "" when the model is gone."""
        path = self.target / model / "config.pbtxt"
        return path.read_text(errors=BYTES) if path.exists() else ""

    def sync(self, is_first: bool = False) -> None:
        """Bring the mirror up to date; cheap, for a call every few hundred milliseconds."""
        folders = {path.name for path in self.source.iterdir() if path.is_dir()}
        if self._workers is not None:
            folders |= self._workers.made.keys()
            folders -= self._workers.left_out
        wanted = {name for name in folders if self._wants(name)}
        for path in self.target.iterdir():
            if path.name not in wanted:
                shutil.rmtree(path)
                self.edits.removed(path.name)
        for name in sorted(wanted):
            with contextlib.suppress(OSError):  # removed while we look, or not ours to read
                self._sync_model(name, is_first)

    def _sync_model(self, name: str, is_first: bool) -> None:
        source, target = self.source / name, self.target / name
        if self._workers is not None:
            source = self.source / self._workers.made.get(name, name)
        config = source / "config.pbtxt"
        raw = config.read_bytes()
        text = raw.decode("utf-8", BYTES)
        newest_s = max(config.stat().st_mtime, source.stat().st_mtime)
        if not is_first and time.time() - newest_s < SETTLED_S:
            return
        if self._workers is not None:
            text = self._workers.rendered(name, text)
        if incarnation := self._incarnations.get(name):
            value = f'value {{ string_value: "{incarnation}" }}'
            text += f'\nparameters {{ key: "{INCARNATION_PARAMETER}" {value} }}\n'
        target.mkdir(exist_ok=True)
        entries = {path.name for path in source.iterdir() if path.name != "config.pbtxt"}
        for link in target.iterdir():
            if link.is_symlink() and link.name not in entries:
                link.unlink()
        for entry in entries:
            if not (target / entry).is_symlink():
                (target / entry).symlink_to(source / entry)
        copy, said = target / "config.pbtxt", text.encode("utf-8", BYTES)
        is_new = not copy.exists() or copy.read_bytes() != said
        if is_new or digest(raw) != self.edits.digest_of(
            name
        ):  # before Triton can say a word of it
            self.edits.mirrored(name, digest(raw), text)
        if is_new:
            partial = self.target.parent / f".{name}.config"
            partial.write_bytes(said)
            partial.replace(copy)  # last: Triton loads a folder as soon as it has a config


def running_settings(
    plan: HostPlan, settings: ServeSettings, workers: WorkerFolders,
    mirrors: Sequence[RepositoryMirror],
) -> dict[str, object]:  # fmt: skip
    """What `mooncake config` asks of a running system, as its metrics port says it."""
    directory = plan.directory_address
    return asdict(RunningSettings(
        repository=str((Path(plan.folder) / plan.model_repository).resolve()),
        options={name: str(value) for name, value in
                 {**settings.parameters, **settings.workers}.items()},
        made=dict(workers.made),
        left_out=sorted(workers.left_out),
        nodes=[node.name for node in plan.storage_nodes],
        directory=directory if directory.startswith("ipc://") else "",
        http=plan.frontend.http.replace("0.0.0.0:", f"{plan.address}:") if plan.frontend else "",
        models={name: state for mirror in mirrors for name, state in mirror.edits.states().items()},
    ))  # fmt: skip


ASK_S_MAX = 2.0
Ask = Callable[[str], bool | None]  # is this model ready? None: Triton does not answer


@dataclass(frozen=True, slots=True)
class ModelState:
    name: str
    is_ready: bool


def ask_http(address: str) -> Ask:
    def ask(model: str) -> bool | None:
        try:
            url = f"http://{address}/v2/models/{model}/ready"
            with DIRECTLY.open(url, timeout=ASK_S_MAX) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False
        except OSError:
            return None

    return ask


def ask_grpc(address: str) -> Ask:
    # gRPC writes each refused handshake to stderr, several a second; who asks says what it means.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc  # here, for who only reads logs
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    from backends.worker_tls import worker_channel

    def ask(model: str) -> bool | None:
        # Each question gets a channel of its own, because one that was refused once waits before
        # it connects again.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        with contextlib.closing(worker_channel(address, options)) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                request = service_pb2.ModelReadyRequest(name=model)
                return bool(stub.ModelReady(request, timeout=ASK_S_MAX).ready)
            except grpc.RpcError as error:
                silent = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                return None if error.code() in silent else False

    return ask


class TritonLog:
    """What Triton wrote of its models since it was read last."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._log_offset = 0
        # Why this incarnation of Triton serves without one of its ports: it goes on when one is
        # taken.
        self.service_problem = ""
        self._refused: dict[str, str] = {}  # model -> why its newest edit was refused
        # A worker has said that it serves, and Triton not yet that it is loaded.
        self.is_load_pending = False

    def moved(self, length_bytes: int) -> None:
        """So many bytes have gone from the front of the file."""
        self._log_offset = max(0, self._log_offset - length_bytes)

    def news(self) -> list[ModelLoad]:
        """Loads and refusals since the last call. Triton tries a refused model again at every
        poll; the same refusal is reported once, until the model has loaded or fails otherwise."""
        try:
            with self._log_path.open("rb") as log:
                if os.fstat(log.fileno()).st_size < self._log_offset:
                    self._log_offset = 0  # it was begun anew
                log.seek(self._log_offset)
                whole_lines = log.read().rpartition(b"\n")[0]
                self._log_offset += len(whole_lines)
        except OSError:
            return []
        text = whole_lines.decode(errors="replace")
        if problem := SERVICE.search(text):
            self.service_problem = problem[0].strip()
        for line in WORKER_READY_OR_LOAD.finditer(text):
            self.is_load_pending = bool(line["worker"])
        found = []
        for load in loads(text):
            if load.reason and self._refused.get(load.model) == load.reason:
                continue
            self._refused.pop(load.model, None)
            if load.reason:
                self._refused[load.model] = load.reason
            found.append(load)
        return found


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Triton loaded a model, or refused to."""

    model: str
    reason: str = ""  # why not; "" when it is loaded


SERVICE = re.compile(r"failed to start \w+ service[^\"\n]*")
WORKER_READY_OR_LOAD = re.compile(  # the first is of workers/worker_process.py
    r"(?P<worker>\S+ \([0-9a-f]{12}\) serves on node )|successfully loaded '|failed to load '"
)
LOAD = re.compile(
    r"successfully loaded '(?P<loaded>[^']+)'"
    r"|failed to load '(?P<refused>[^']+)' version \d+: (?P<reason>.*?)(?=\n[EWIF]\d{4} |\Z)",
    flags=re.DOTALL,
)


def loads(log_text: str) -> list[ModelLoad]:
    """What Triton's log says of loading models, in its order."""
    return [
        ModelLoad(match["loaded"]) if match["loaded"] else ModelLoad(
            match["refused"], tidy_reason(match["reason"]))
        for match in LOAD.finditer(log_text)
    ]  # fmt: skip


def tidy_reason(reason: str) -> str:
    """Drop the traceback and status words that Triton wraps around a model's own message."""
    reason = reason.strip().removesuffix('"').replace("\\n", "\n")  # the log escapes line ends
    reason = re.sub(r"^(Internal|Invalid argument|Unavailable): ", "", reason)
    reason = re.sub(r"\n\nAt:\n.*", "", reason, flags=re.DOTALL)
    return re.sub(r"^(\w+Error|TritonModelException|ConfigError): ", "", reason.strip())
