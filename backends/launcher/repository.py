"""The model repository of one Triton: its mirrored folder, and the states of its models.

**Mirror.** Each Triton of the launcher serves a part of the operator's repository
(triton_process.py) and polls a mirror of this part. The mirror has symbolic links to the operator's
files. Only config.pbtxt is a copy, with the launch's options. The operator's files are only read.

Triton reloads a model only when the content of config.pbtxt changes, and it never restarts the
process of a model that died. For such a model, the mirror appends a parameter with a new
*incarnation* number to the copy of config.pbtxt. Triton then starts the model again.

The mirror takes over a folder when its content has not changed for SETTLED_S. The reason is that
editors and copies write in several steps, and Triton gives up on a model without a version folder.
Modification times do not count. If Triton could not read a config.pbtxt, the mirror refuses it,
keeps the previous copy, and reports file, line and remedy.

**Model states.** Triton's API reports which models are ready. Triton's log has the reason why a
model did not load, which is reported without the traceback.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from backends.cluster.host_plan import HostPlan, reached_at
from backends.cluster.model_rendering import BACKEND, BYTES, CONFIG, ROLES
from backends.direct_http import CALL_FAILED, DIRECTLY
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
from mooncake_store.process.process_memory import pid_space

SETTLED_S = 0.15  # seconds without a change of a folder after which the mirror takes it over
# A leading underscore marks a parameter that the launcher adds.
INCARNATION_PARAMETER = "_incarnation"


def backend_of(model: Path) -> str | None:
    """The backend that config.pbtxt names. None if the file names none or is unreadable."""
    try:
        raw = read_config(model)
    except ConfigError:
        return None
    found = BACKEND.search(raw.decode("utf-8", BYTES))
    return found[1] if found and not reading_problem(model.name, raw) else None


class WorkerFolders:
    """The prefill and decode workers of the operator's repository. If the options demand more
    workers of a role than there are folders, further workers use the first folder of the role."""

    def __init__(
        self, repository: Path, settings: ServeSettings = NO_SETTINGS, nodes: Sequence[str] = ()
    ) -> None:
        """Raises ConfigError if the options demand workers of a role that has no folder."""
        self._repository = repository
        self._settings, self._nodes = settings, nodes
        self._names: set[str] = set()
        self._served = ServedWorkers()
        self.made: dict[str, str] = {}  # worker without a folder -> the folder that it uses
        if settings.workers and repository.is_dir():
            workers = {
                name: backend for name, backend in self._backends().items() if backend in ROLES
            }
            self._served = served_workers(settings, workers)
            self.names()

    @property
    def left_out(self) -> frozenset[str]:
        """Worker folders that are not served, because the options demand fewer workers."""
        return self._served.left_out

    def rendered(self, model: str, text: str) -> str:
        """The text of the mirrored config.pbtxt. `text`: that of the operator's config.pbtxt."""
        number = self._served.made[model][1] if model in self.made else None
        return rendered(self._settings, text, number, self._nodes)

    def unreadable(self) -> list[str]:
        """A message with remedy for each served model whose config.pbtxt cannot be read."""
        found = []
        for model in sorted(path.parent for path in self._repository.glob(f"*/{CONFIG}")):
            if model.name not in self.left_out:
                try:
                    found.append(reading_problem(model.name, read_config(model)))
                except ConfigError as error:
                    found.append(str(error))
        return list(filter(None, found))

    def _backends(self) -> dict[str, str | None]:
        """Folder of the repository -> its backend. Raises OSError without a repository."""
        folders = [path for path in self._repository.iterdir() if path.is_dir()]
        return {path.name: backend_of(path) for path in folders}

    def names(self) -> set[str]:
        """The names of all workers. A worker whose config.pbtxt became unreadable stays a worker.
        While the repository is unreadable, the names are those of the previous call."""
        try:
            found = self._backends()
        except OSError:  # the repository was moved or unmounted
            return self._names
        self._names = {
            name
            for name, backend in found.items()
            if backend in ROLES or (backend is None and name in self._names)
        } - self.left_out
        if self._served.made:
            workers = {
                name: backend or "" for name, backend in found.items() if name in self._names
            }
            self.made = {
                name: source
                for name in self._served.made
                if name not in workers and (source := self._served.source_of(name, workers))
            }
            self._names |= self.made.keys()
        return self._names


class EditStates:
    """The state of the operator's newest config.pbtxt of each model: pending, loaded or refused.
    Any thread may read the states."""

    def __init__(self) -> None:
        self._now: dict[str, EditState] = {}
        # Model -> text of the mirrored copy, and text that Triton loaded; both without comments.
        self._mirrored: dict[str, str] = {}
        self._loaded: dict[str, str] = {}
        # Model -> state of the mirrored copy, for models whose newest file the mirror refuses.
        self._kept: dict[str, EditState] = {}

    def mirrored(self, model: str, digest: str, text: str) -> None:
        """Note that the mirror will write `text`. `digest`: that of the operator's file."""
        meaning = without_comments(text)
        before = self._kept.pop(model, self._now.get(model))
        if before is not None and meaning == self._mirrored.get(model):
            self._now[model] = replace(before, digest=digest)
            return
        self._mirrored[model] = meaning
        # If an edit that Triton refused was undone, Triton does not load the model again.
        outcome = LOADED if meaning == self._loaded.get(model) else PENDING
        self._now[model] = EditState(digest, outcome)

    def refused(self, model: str, digest: str, reason: str) -> None:
        """Note that the mirror refused the operator's file with this digest."""
        if model in self._mirrored and (now := self._now.get(model)) is not None:
            self._kept.setdefault(model, now)
        self._now[model] = EditState(digest, REFUSED, reason)

    def revived(self, model: str, text: str) -> None:
        """Note that Triton will reload the mirrored copy, while the mirror refuses a newer file."""
        self._mirrored[model] = without_comments(text)

    def loaded(self, load: ModelLoad) -> None:
        """Note that Triton loaded or refused the mirrored copy."""
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
    """The content of a model's folder at one moment, without modification times."""

    has_config: bool = False
    raw: bytes = b""  # content of config.pbtxt
    problem: str = ""  # reason why config.pbtxt cannot be served, with remedy; "" if it can be
    entries: frozenset[str] = frozenset()  # names of all entries except config.pbtxt


class RepositoryMirror:
    def __init__(
        self,
        source: Path,
        target: Path,
        wants: Callable[[str], bool],
        workers: WorkerFolders | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Empties the folder `target`. The mirror contains the models for which `wants` is True.
        `workers` renders each config.pbtxt, and adds workers that share a folder. Without
        `workers`, the mirror copies each config.pbtxt unchanged."""
        self.source = source.resolve()
        self.target = target
        self.edits = EditStates()
        self._wants = wants
        self._workers = workers
        self._clock = clock
        self._incarnations: dict[str, int] = {}
        # Model -> last content of its folder, and the time at which this content was first seen.
        self._seen: dict[str, tuple[ModelFolder, float]] = {}
        self._taken: dict[str, ModelFolder] = {}  # model -> content that the mirror took over
        self._refused: dict[str, str] = {}  # model -> digest of the refused file, and the problem
        self._news: list[ModelLoad] = []
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)

    def revive(self, model: str) -> None:
        """Make Triton start this model again with the same settings. The next `sync` does it."""
        self._incarnations[model] = self._incarnations.get(model, 0) + 1

    def models(self) -> set[str]:
        return {path.parent.name for path in self.target.glob("*/config.pbtxt")}

    def config(self, model: str) -> str:
        """The text of the mirrored config.pbtxt; "" if the model is not in the mirror."""
        path = self.target / model / "config.pbtxt"
        return path.read_text("utf-8", BYTES) if path.exists() else ""

    def take_refusals(self) -> list[ModelLoad]:
        """News since the last call: edits that the mirror refused, and refused edits undone."""
        news, self._news = self._news, []
        return news

    def sync(self, is_first: bool = False) -> None:
        """Update the mirror. To be called every few hundred milliseconds. With `is_first`, folders
        are taken over without waiting for SETTLED_S."""
        try:
            folders = {path.name for path in self.source.iterdir() if path.is_dir()}
        except OSError:  # the repository was moved or unmounted; each model reports this problem
            folders = set(self._taken)
        if self._workers is not None:
            folders |= self._workers.made.keys()
            folders -= self._workers.left_out
        wanted = {name for name in folders if self._wants(name)}
        for name in {path.name for path in self.target.iterdir()} | self._seen.keys():
            if name not in wanted:
                self._remove(name)
        for name in sorted(wanted):
            with contextlib.suppress(OSError):  # a full disk, for example; the next call retries
                self._sync_model(name, is_first)

    def _remove(self, name: str) -> None:
        gone = self.target.parent / f".{name}.gone"  # Triton must not poll a half-removed folder
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
        """Take over a settled folder, or refuse the folder and report the refusal once."""
        taken = self._taken.get(name)
        problem = folder.problem or _lost_backend(name, folder, taken)
        if not problem:
            self._taken[name] = folder
            if self._refused.pop(name, None) and taken is not None and taken.raw == folder.raw:
                self._news.append(ModelLoad(name))  # because Triton will not report a load
            return
        if taken is None and not folder.has_config:
            return  # the operator has not written the config.pbtxt of this new model yet
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
        # Triton reports an error for a folder without config.pbtxt. A new folder is therefore
        # filled outside the mirror, and then moved into it.
        made = target if target.exists() else self.target.parent / f".{name}.model"
        made.mkdir(exist_ok=True)
        for link in made.iterdir():
            if link.is_symlink() and link.name not in folder.entries:
                link.unlink()
        for entry in folder.entries:
            if not (made / entry).is_symlink():
                (made / entry).symlink_to(source / entry)
        copy, content = made / CONFIG, text.encode("utf-8", BYTES)
        is_new = not copy.exists() or copy.read_bytes() != content
        # The state of the edit must change before Triton can report a load of the copy.
        if name in self._refused:
            if is_new:
                self.edits.revived(name, text)
        elif is_new or digest(folder.raw) != self.edits.digest_of(name):
            self.edits.mirrored(name, digest(folder.raw), text)
        if is_new:
            partial = self.target.parent / f".{name}.config"
            partial.write_bytes(content)
            partial.replace(copy)  # last, because Triton loads a model once it has a config.pbtxt
        if made != target:
            made.rename(target)


def _lost_backend(name: str, folder: ModelFolder, taken: ModelFolder | None) -> str:
    """The problem of a config.pbtxt that lost its backend line; "" if it did not. Triton would
    accept the file without this line, and guess a backend."""
    if taken is None or BACKEND.search(folder.raw.decode("utf-8", BYTES)):
        return ""
    found = BACKEND.search(taken.raw.decode("utf-8", BYTES))
    return f"{name}/{CONFIG} lost its line `{found[0].strip()}`: put it back" if found else ""


def running_settings(
    plan: HostPlan,
    settings: ServeSettings,
    workers: WorkerFolders,
    mirrors: Sequence[RepositoryMirror],
    processes: Mapping[str, list[int]],
) -> dict[str, object]:
    """The JSON body that the metrics port serves to `mooncake config`."""
    directory = plan.directory_address
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
            http=reached_at(plan.frontend.http, plan.address) if plan.frontend else "",
            openai=plan.gateway.listen if plan.gateway else "",
            models={
                name: state for mirror in mirrors for name, state in mirror.edits.states().items()
            },
            processes=processes,
            pid_space=pid_space(),
        )
    )


ASK_S_MAX = 2.0  # timeout of one readiness call


@dataclass(frozen=True, slots=True)
class ModelState:
    name: str
    is_ready: bool


def ready_by_http(address: str, model: str) -> bool | None:
    """Whether the model is ready; None if Triton does not answer."""
    try:
        url = f"http://{address}/v2/models/{model}/ready"
        with DIRECTLY.open(url, timeout=ASK_S_MAX) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False
    except CALL_FAILED:
        return None


def ready_by_grpc(address: str, model: str) -> bool | None:
    """As `ready_by_http`. Each call opens a new channel, because a known channel would wait longer
    and longer after a refused connection."""
    # By default, gRPC writes each refused handshake to stderr, several per second.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc  # imported here, because not all users of this module need it
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    from backends.worker_tls import worker_channel

    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    with contextlib.closing(worker_channel(address, options)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            request = service_pb2.ModelReadyRequest(name=model)
            return bool(stub.ModelReady(request, timeout=ASK_S_MAX).ready)
        except grpc.RpcError as error:
            silent = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            return None if error.code() in silent else False


class TritonLog:
    """Reads loads and refusals of models, and taken ports, from the new part of Triton's log."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._log_offset = 0
        # Reason why this incarnation lacks one of its ports; "" if it has all of them. Without its
        # metrics port, Triton does not exit.
        self.service_problem = ""
        self._refused: dict[str, str] = {}  # model -> reason why Triton refused its newest edit
        # True from the worker's log line that it serves until Triton logs its load or refusal.
        self.is_load_pending = False

    def moved(self, length_bytes: int) -> None:
        """Note that `length_bytes` were removed from the start of the file."""
        self._log_offset = max(0, self._log_offset - length_bytes)

    def news(self) -> list[ModelLoad]:
        """Loads and refusals since the last call. Triton retries a refused model at every poll, so
        equal refusals are returned once, until the model loads or fails for another reason."""
        try:
            with self._log_path.open("rb") as log:
                if os.fstat(log.fileno()).st_size < self._log_offset:
                    self._log_offset = 0  # the file was truncated
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
    """Triton loaded a model, or Triton or the mirror refused its config.pbtxt."""

    model: str
    reason: str = ""  # reason why the model was refused; "" if it was loaded
    is_new: bool = False  # True if Triton serves no older settings of the model


SERVICE = re.compile(r"failed to start \w+ service[^\"\n]*")
WORKER_READY_OR_LOAD = re.compile(  # workers/worker_process.py logs the first alternative
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
    """The loads and refusals in a text of Triton's log, in order."""
    return [
        ModelLoad(match["loaded"])
        if match["loaded"]
        else ModelLoad(match["refused"] or match["unreadable"], tidy_reason(match["reason"]))
        for match in LOAD.finditer(log_text)
    ]


def tidy_reason(reason: str) -> str:
    """The message of the model, without the traceback and status codes that Triton adds."""
    reason = reason.strip().removesuffix('"').replace("\\n", "\n")  # the log escapes line ends
    reason = re.sub(r"^(Internal|Invalid argument|Unavailable): ", "", reason)
    reason = re.sub(r"\n\nAt:\n.*", "", reason, flags=re.DOTALL)
    return re.sub(r"^(\w+Error|TritonModelException|ConfigError): ", "", reason.strip())
