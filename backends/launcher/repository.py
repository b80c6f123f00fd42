"""The model repository as a Triton has it: the folder that it polls, what it says of the models.

**The mirror.** Each Triton of the launcher serves a part of the operator's repository
(triton_process.py), so each polls a mirror of that part: everything is a link to the operator's
files except config.pbtxt, which is a copy. Triton loads a model anew only when its config.pbtxt
really changes, and it never restarts a model's process that died; such a model gets a new
*incarnation*, one more parameter at the end of its copy, and Triton starts it again. The operator's
files are only read. A folder is taken over when its content has not changed for a moment: editors
and copies work in steps, and Triton gives up on a model whose version folder is not there yet. The
dates of files do not count. A config.pbtxt that Triton could not read is not copied: the mirror
keeps the copy before it and reports the refusal with file, line and remedy.

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from backends.cluster.host_plan import HostPlan
from backends.cluster.model_rendering import BYTES, CONFIG
from backends.direct_http import DIRECTLY
from backends.errors import ConfigError
from backends.model_settings.model_file import reading_problem, without_comments
from backends.model_settings.repository_files import digest, read_config
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
# Names with a leading underscore are the launcher's, not the operator's.
INCARNATION_PARAMETER = "_incarnation"
WORKER_BACKENDS = ("prefill", "decode")
BACKEND = re.compile(r'^\s*(?:backend|platform)\s*:\s*"([^"]*)"', re.MULTILINE)


def backend_of(model: Path) -> str | None:
    """As a model folder's config.pbtxt names it; None when there is none (yet), or when Triton
    could not read the file."""
    try:
        raw = read_config(model)
    except ConfigError:
        return None
    found = BACKEND.search(raw.decode("utf-8", BYTES))
    return found[1] if found and not reading_problem(model.name, raw) else None


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

    def unreadable(self) -> list[str]:
        """Why models that are to be served cannot be read, each with its remedy."""
        found = []
        for model in sorted(path.parent for path in self._repository.glob(f"*/{CONFIG}")):
            if model.name not in self.left_out:
                try:
                    found.append(reading_problem(model.name, read_config(model)))
                except ConfigError as error:
                    found.append(str(error))
        return list(filter(None, found))

    def _backends(self) -> dict[str, str]:
        found = {
            path.name: backend_of(path) for path in self._repository.iterdir() if path.is_dir()
        }
        return {name: backend for name, backend in found.items() if backend in WORKER_BACKENDS}

    def names(self) -> set[str]:
        """A folder whose config.pbtxt says nothing at the moment is what it was."""
        try:
            folders = [path for path in self._repository.iterdir() if path.is_dir()]
        except OSError:  # the repository is moved or unmounted
            return self._names
        found = {path.name: backend_of(path) for path in folders}
        self._names = {
            name
            for name, backend in found.items()
            if backend in WORKER_BACKENDS or (backend is None and name in self._names)
        } - self.left_out
        if self._served.made:
            workers = {
                name: backend or "" for name, backend in found.items() if name in self._names
            }
            self._made = {
                name: source
                for name in self._served.made
                if name not in workers and (source := self._served.source_of(name, workers))
            }
            self._names |= self._made.keys()
        return self._names


class EditStates:
    """What became of the newest config.pbtxt of each model. Read from any thread."""

    def __init__(self) -> None:
        self._now: dict[str, EditState] = {}
        self._mirrored: dict[str, str] = {}  # model -> what the copy means
        self._loaded: dict[str, str] = {}
        # Model -> state of the copy that Triton has, while the mirror refuses the newest file.
        self._kept: dict[str, EditState] = {}

    def mirrored(self, model: str, digest: str, text: str) -> None:
        """Triton is going to see this text, made of the operator's file with this digest."""
        meaning = without_comments(text)
        before = self._kept.pop(model, self._now.get(model))
        if before is not None and meaning == self._mirrored.get(model):
            self._now[model] = replace(before, digest=digest)
            return
        self._mirrored[model] = meaning
        # Triton loads nothing when a refused edit is taken back.
        outcome = LOADED if meaning == self._loaded.get(model) else PENDING
        self._now[model] = EditState(digest, outcome)

    def refused(self, model: str, digest: str, reason: str) -> None:
        """The mirror does not copy the operator's file with this digest."""
        if model in self._mirrored and (now := self._now.get(model)) is not None:
            self._kept.setdefault(model, now)
        self._now[model] = EditState(digest, REFUSED, reason)

    def revived(self, model: str, text: str) -> None:
        """Triton loads the copy that it has once more, while the newest file is refused."""
        self._mirrored[model] = without_comments(text)

    def heard(self, load: ModelLoad) -> None:
        """Triton loaded or refused the copy that it has."""
        states = self._kept if load.model in self._kept else self._now
        before = states.get(load.model)
        if before is None or load.model not in self._mirrored:
            return
        outcome = REFUSED if load.reason else LOADED
        states[load.model] = EditState(before.digest, outcome, load.reason)
        if not load.reason:
            self._loaded[load.model] = self._mirrored[load.model]

    def removed(self, model: str) -> None:
        for each in (self._now, self._mirrored, self._loaded, self._kept):
            each.pop(model, None)

    def digest_of(self, model: str) -> str:
        state = self._now.get(model)
        return state.digest if state is not None else ""

    def states(self) -> dict[str, EditState]:
        return dict(self._now)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One look at a model's folder. Equal looks have equal content; dates do not count."""

    has_config: bool = False
    raw: bytes = b""  # of config.pbtxt
    problem: str = ""  # why config.pbtxt cannot be served, with its remedy; "": it can
    entries: frozenset[str] = frozenset()  # names beside config.pbtxt


class RepositoryMirror:
    def __init__(
        self,
        source: Path,
        target: Path,
        wants: Callable[[str], bool],
        workers: WorkerFolders | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wants`: is this model part of the mirror? `workers`: those that are made of others, and
        how models are rendered; without, all are as their files say."""
        self.source = source.resolve()
        self.target = target
        self.edits = EditStates()
        self._wants = wants
        self._workers = workers
        self._clock = clock
        self._incarnations: dict[str, int] = {}
        self._seen: dict[str, tuple[ModelFolder, float]] = {}  # model -> last look, first seen at s
        self._taken: dict[str, ModelFolder] = {}  # model -> the newest look that it serves
        self._refused: dict[str, str] = {}  # model -> why its newest file is not served
        self._news: list[ModelLoad] = []
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
        return path.read_text("utf-8", BYTES) if path.exists() else ""

    def take_refusals(self) -> list[ModelLoad]:
        """Edits that the mirror refused since the last call, and refused edits taken back."""
        news, self._news = self._news, []
        return news

    def sync(self, is_first: bool = False) -> None:
        """Bring the mirror up to date; cheap, for a call every few hundred milliseconds."""
        try:
            folders = {path.name for path in self.source.iterdir() if path.is_dir()}
        except OSError:  # the repository is moved or unmounted: each of its models reports that
            folders = set(self._taken)
        if self._workers is not None:
            folders |= self._workers.made.keys()
            folders -= self._workers.left_out
        wanted = {name for name in folders if self._wants(name)}
        for name in {path.name for path in self.target.iterdir()} | self._seen.keys():
            if name not in wanted:
                self._remove(name)
        for name in sorted(wanted):
            with contextlib.suppress(OSError):  # the target's disk is full: the next call retries
                self._sync_model(name, is_first)

    def _remove(self, name: str) -> None:
        gone = self.target.parent / f".{name}.gone"  # Triton shall not see a folder without files
        with contextlib.suppress(FileNotFoundError):
            (self.target / name).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        self.edits.removed(name)
        for each in (self._seen, self._taken, self._refused):
            each.pop(name, None)

    def _sync_model(self, name: str, is_first: bool) -> None:
        source = self.source / name
        if self._workers is not None:
            source = self.source / self._workers.made.get(name, name)
        folder = self._looked_at(source)
        before, since_s = self._seen.get(name, (None, 0.0))
        now_s = self._clock()
        if folder != before:
            self._seen[name] = (folder, since_s := now_s)
        if is_first or now_s - since_s >= SETTLED_S:
            self._judge(name, folder)
        if name in self._taken:
            self._write(name, source, self._taken[name])

    def _looked_at(self, source: Path) -> ModelFolder:
        raw = b""
        entries: set[str] = set()
        try:
            entries = {path.name for path in source.iterdir()}
            raw = read_config(source)
            problem = reading_problem(source.name, raw)
        except OSError as error:
            problem = f"{source} cannot be read ({error.strerror}): make it readable, or remove it"
        except ConfigError as error:
            problem = str(error)
        has_config = CONFIG in entries
        return ModelFolder(has_config, raw, problem, frozenset(entries - {CONFIG}))

    def _judge(self, name: str, folder: ModelFolder) -> None:
        """Take a settled folder, or refuse it and report that once."""
        taken = self._taken.get(name)
        problem = folder.problem or _lost_backend(name, folder, taken)
        if not problem:
            self._taken[name] = folder
            if self._refused.pop(name, None) and taken is not None and taken.raw == folder.raw:
                self._news.append(ModelLoad(name))  # Triton loads nothing, so it reports nothing
            return
        if taken is None and not folder.has_config:
            return  # a folder that is being copied is no model yet
        report = f"{digest(folder.raw)} {problem}"
        if self._refused.get(name) != report:
            self._refused[name] = report
            self.edits.refused(name, digest(folder.raw), problem)
            self._news.append(ModelLoad(name, problem, is_new=taken is None))

    def _write(self, name: str, source: Path, folder: ModelFolder) -> None:
        target, text = self.target / name, folder.raw.decode("utf-8", BYTES)
        if self._workers is not None:
            text = self._workers.rendered(name, text)
        if incarnation := self._incarnations.get(name):
            value = f'value {{ string_value: "{incarnation}" }}'
            text += f'\nparameters {{ key: "{INCARNATION_PARAMETER}" {value} }}\n'
        # Triton reports a folder without a config.pbtxt, so a new one is made elsewhere.
        made = target if target.exists() else self.target.parent / f".{name}.model"
        made.mkdir(exist_ok=True)
        for link in made.iterdir():
            if link.is_symlink() and link.name not in folder.entries:
                link.unlink()
        for entry in folder.entries:
            if not (made / entry).is_symlink():
                (made / entry).symlink_to(source / entry)
        copy, said = made / CONFIG, text.encode("utf-8", BYTES)
        is_new = not copy.exists() or copy.read_bytes() != said
        # The states change before Triton can report anything of the copy.
        if name in self._refused:
            if is_new:
                self.edits.revived(name, text)
        elif is_new or digest(folder.raw) != self.edits.digest_of(name):
            self.edits.mirrored(name, digest(folder.raw), text)
        if is_new:
            partial = self.target.parent / f".{name}.config"
            partial.write_bytes(said)
            partial.replace(copy)  # last: Triton loads a folder as soon as it has a config
        if made != target:
            made.rename(target)


def _lost_backend(name: str, folder: ModelFolder, taken: ModelFolder | None) -> str:
    """Triton guesses the backend of a model that names none, so only a loss is a mistake."""
    if taken is None or BACKEND.search(folder.raw.decode("utf-8", BYTES)):
        return ""
    found = BACKEND.search(taken.raw.decode("utf-8", BYTES))
    return f"{name}/{CONFIG} lost its line `{found[0].strip()}`: put it back" if found else ""


def running_settings(
    plan: HostPlan,
    settings: ServeSettings,
    workers: WorkerFolders,
    mirrors: Sequence[RepositoryMirror],
) -> dict[str, object]:
    """What `mooncake config` asks of a running system, as its metrics port says it."""
    directory = plan.directory_address
    gateway = plan.frontend.gateway if plan.frontend else None
    return asdict(
        RunningSettings(
            repository=str((Path(plan.folder) / plan.model_repository).resolve()),
            options={
                name: str(value)
                for name, value in {**settings.parameters, **settings.workers}.items()
            },
            made=dict(workers.made),
            left_out=sorted(workers.left_out),
            nodes=[node.name for node in plan.storage_nodes],
            directory=directory if directory.startswith("ipc://") else "",
            http=plan.frontend.http.replace("0.0.0.0:", f"{plan.address}:")
            if plan.frontend
            else "",
            openai=gateway.listen if gateway else "",
            models={
                name: state for mirror in mirrors for name, state in mirror.edits.states().items()
            },
        )
    )


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
    is_new: bool = False  # a refused model that has no older settings to serve with


SERVICE = re.compile(r"failed to start \w+ service[^\"\n]*")
WORKER_READY_OR_LOAD = re.compile(  # the first is of workers/worker_process.py
    r"(?P<worker>\S+ \([0-9a-f]{12}\) serves on node )|successfully loaded '|failed to load '"
)
LOAD = re.compile(
    r"successfully loaded '(?P<loaded>[^']+)'"
    r"|(?:failed to load '(?P<refused>[^']+)' version \d+"
    r"|[Pp]oll failed for model directory '(?P<unreadable>[^']+)'): "
    r"(?P<reason>.*?)(?=\n[EWIF]\d{4} |\Z)",
    flags=re.DOTALL,
)


def loads(log_text: str) -> list[ModelLoad]:
    """What Triton's log says of loading models, in its order."""
    return [
        ModelLoad(match["loaded"])
        if match["loaded"]
        else ModelLoad(match["refused"] or match["unreadable"], tidy_reason(match["reason"]))
        for match in LOAD.finditer(log_text)
    ]


def tidy_reason(reason: str) -> str:
    """Drop the traceback and status words that Triton wraps around a model's own message."""
    reason = reason.strip().removesuffix('"').replace("\\n", "\n")  # the log escapes line ends
    reason = re.sub(r"^(Internal|Invalid argument|Unavailable): ", "", reason)
    reason = re.sub(r"\n\nAt:\n.*", "", reason, flags=re.DOTALL)
    return re.sub(r"^(\w+Error|TritonModelException|ConfigError): ", "", reason.strip())
