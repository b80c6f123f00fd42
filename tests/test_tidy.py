"""The house rules that a machine can check: shape of files, imports, what may be in the tree."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = {"conductor", "mooncake_store", "backends", "loadtest"}
PACKAGES = {*SHIPPED, "bench", "tools"}
MAY_IMPORT = {
    "conductor": {"mooncake_store"},
    "mooncake_store": set(),
    "backends": {"conductor", "mooncake_store"},
    "loadtest": {"conductor", "mooncake_store", "backends"},
    "bench": SHIPPED,
    "tools": {*SHIPPED, "bench"},
    "tests": PACKAGES,
}
STANDARD_PURE = {
    "__future__",
    "array",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "numpy",
    "re",
    "struct",
    "typing",
    "ctypes",  # to compute in native.c what their Python says
}
# Rooms of a package from the top floor down: a room imports from its own and from lower floors, and
# two rooms of one floor do not know each other. The longest name that fits a file is its room; a
# module named here stands beside the rooms.
FLOORS = {
    "mooncake_store": [
        {"cli", "node"}, {"client", "ssd"}, {"transports"}, {"transports/paths", "prefix_index"},
        {"directory", "memory"}, {"wire", "directory/core"}, {"keys"}, {"records", "process"},
        {"block_keys", "layout"}, {"errors", "sizes"}, {"native"},
    ],
    "conductor": [
        {"conductor"}, {"admission", "replication", "roles"}, {"routing", "admission/limits"},
        {"load"}, {"estimates"}, {"config"}, {"queue_order", "messages", "notes"},
    ],
    "backends": [
        {"cli"}, {"doctor"}, {"conductor", "prefill", "decode", "preprocessing", "postprocessing"},
        {"launcher", "starter"}, {"model_settings"}, {"cluster"}, {"gateway"},
        {"gateway/page", "gateway/messages", "gateway/responses"}, {"gateway/answer"},
        {"gateway/request"}, {"triton"},
        {"frontend"}, {"frontend/lifecycle", "frontend/decisions"}, {"tracing"},
        {"workers/connected", "workers/pipeline", "workers/roles"}, {"workers"},
        {"engine/plain_vllm"}, {"engine/torch", "engine/trtllm", "engine/vllm"},
        {"engine/connected"},
        {"engine", "text"}, {"engine/batching"}, {"demo_checkpoint"},
        {"metrics", "models", "tenants"},
        {"config_pbtxt", "tensors", "token_logprobs", "launch_secret", "worker_tls", "statuses"},
        {"direct_http", "errors", "extras", "shipped"},
    ],
    "loadtest": [
        {"locustfile"}, {"bench", "clients"}, {"planner"}, {"users", "simulator"}, {"profile"},
        {"harness"}, {"replay"}, {"report"}, {"client"}, {"results"},
    ],
    "bench": [
        {
            "connector", "directory", "engine_gpu", "engine_vllm", "fleet", "gateway", "index",
            "layerwise", "overhead", "pipeline", "plan", "precision", "reuse", "sim_reality",
            "start_stop", "store", "tenants",
        },
        {"headline"},
        {"cross_host", "engine", "leaks", "overload", "ssd_tier"},
        {"clients", "paper", "store/ways"},
        {"crowd", "dynamo"}, {"harness"},
    ],
    "tools": [{"demo_model", "metric_docs", "parameter_docs"}, {"parameter_meanings"}],
}  # fmt: skip
# Folders without clock, I/O and randomness of their own.
PURE_FOLDERS = (
    "conductor",
    "mooncake_store/directory/core",
    "mooncake_store/prefix_index",
    "mooncake_store/records",
    "mooncake_store/transports/paths",
    "backends/engine/batching",
    "backends/metrics",
    "backends/frontend/lifecycle",
)
# Loads compiled code, once, and the same comes out with it and without.
COMPUTES_ONLY = {"mooncake_store/native/library.py"}
# Rooms inside of them that read and print.
NOT_PURE_FOLDERS = ("backends/metrics/status",)
PURE_FILES = {
    "mooncake_store/block_keys.py",
    "mooncake_store/errors.py",
    "mooncake_store/layout.py",
    "backends/cluster/deployment.py",
    "backends/cluster/host_plan.py",
    "backends/tracing/trace_context.py",
    "backends/tracing/request_spans.py",
}
ONE_FILE_ONLY = {
    "nixl": {
        "mooncake_store/transports/nixl_agent.py",
        "mooncake_store/transports/nixl_transport.py",
    },
    "triton_python_backend_utils": {"backends/triton/triton_io.py"},
}
# Engines of others: the only folder that may import each.
ENGINE_HOMES = {"tensorrt_llm": "backends/engine/trtllm", "vllm": "backends/engine/vllm"}
LINES_MAX, MODEL_LINES_MAX, FUNCTION_LINES_MAX = 600, 150, 70
MODULES_MAX = 16  # directly in a folder
# Words that no other system of this field has; docs/ARCHITECTURE.md has the words of the field.
DIALECT = {
    "asker",
    "askers",
    "bury",
    "claims",
    "crowding",
    "emission",
    "emissions",
    "front",
    "keepsake",
    "keepsakes",
    "lasts",
    "letter",
    "letters",
    "lingering",
    "manners",
    "mine",
    "newcomer",
    "newcomers",
    "newness",
    "overtaker",
    "overtakers",
    "prank",
    "pranks",
    "shelf",
    "standing",
    "strike",
    "striker",
    "strikes",
    "told",
    "untold",
    "upkeep",
    "zombies",
}

# The same in comments, docstrings, messages and pages.
OLD_WORDS = re.compile(
    r"\b(askers?|pranks?|strikes?|keepsakes?|emissions?|lasts|crowding|lingering|let in"
    r"|turned away|passes whole)\b",
    re.IGNORECASE,
)
WIRE_WORDS = re.compile(r'"asker"|^asker |max-ping-strikes')  # of JSON and gRPC


def tracked(suffix: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"*{suffix}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def imported_modules(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_pure(path: Path) -> bool:
    folder = path.parent.as_posix() + "/"
    if any(folder.startswith(shell + "/") for shell in NOT_PURE_FOLDERS):
        return False
    return str(path) in PURE_FILES or any(folder.startswith(pure + "/") for pure in PURE_FOLDERS)


def room_of(module: str) -> tuple[str, int] | None:
    """The room of a module given by its dotted name, and its floor from the top."""
    package, *rest = module.split(".")
    for length in range(len(rest), 0, -1):
        room = "/".join(rest[:length])
        for floor, rooms in enumerate(FLOORS.get(package, ())):
            if room in rooms:
                return room, floor
    return None


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without the signature: a command has an option in each of its lines."""
    return (function.end_lineno or 0) - function.body[0].lineno


def shape_problems(path: Path, text: str, tree: ast.Module) -> Iterator[str]:
    lines_max = MODEL_LINES_MAX if path.name == "model.py" else LINES_MAX
    if (lines := text.count("\n")) > lines_max:
        yield f"{path}: {lines} lines, at most {lines_max}. Split by noun."
    if ast.get_docstring(tree) is None and text.strip():
        yield f"{path}: say what lives here, and what does not, in a module docstring"
    for node in nodes_of(path):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and body_lines(node) >= FUNCTION_LINES_MAX:
            yield f"{path}:{node.lineno}: {node.name} is over {FUNCTION_LINES_MAX} lines"
    if path.name == "__init__.py":
        allowed = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign)
        if any(not isinstance(node, allowed) for node in tree.body):
            yield f"{path}: __init__ holds a docstring and re-exports only"


def import_problems(path: Path) -> Iterator[str]:
    package = path.parts[0]
    modules = set(imported_modules(nodes_of(path)))
    tops = {module.split(".")[0] for module in modules}
    if package in MAY_IMPORT:
        for other in (tops & PACKAGES) - {package} - MAY_IMPORT[package]:
            yield f"{path}: {package} may not import {other}"
    if package == "conductor":
        files = {m: Path(m.replace(".", "/") + ".py") for m in modules}
        for module, file in files.items():
            is_module = module.startswith("mooncake_store.") and (ROOT / file).exists()
            if is_module and not is_pure(file) and str(file) not in COMPUTES_ONLY:
                yield f"{path}: {module} is not pure, so conductor may not import it"
    if is_pure(path):
        for other in tops - STANDARD_PURE - {package, "mooncake_store", "conductor"}:
            yield f"{path}: pure modules import no {other}; pass the fact in as an argument"
    yield from floor_problems(path, modules)
    for library, homes in ONE_FILE_ONLY.items():
        if library in tops and package in PACKAGES and str(path) not in homes:
            yield f"{path}: only {', '.join(sorted(homes))} may import {library}"


def engine_problems(path: Path) -> Iterator[str]:
    tops = {module.split(".")[0] for module in imported_modules(nodes_of(path))}
    for engine, home in ENGINE_HOMES.items():
        if engine in tops and not path.is_relative_to(home):
            yield f"{path}: only {home} may import {engine}"


def floor_problems(path: Path, modules: set[str]) -> Iterator[str]:
    package = path.parts[0]
    here = room_of(str(path.with_suffix("")).replace("/", "."))
    if package in FLOORS and here is None and path.name != "__init__.py":
        yield f"{path}: no floor has this room; see FLOORS"
    for module in sorted(modules):
        there = room_of(module) if module.split(".")[0] == package else None
        if here and there and there[0] != here[0] and there[1] <= here[1]:
            yield f"{path}: {here[0]} may not import {module}, which is not below it"


@pytest.mark.parametrize("folder", sorted({path.parts[0] for path in tracked(".py")}))
def test_the_python_files_of_a_folder_keep_the_house_rules(folder: str) -> None:
    problems = [
        problem
        for path in tracked(".py")
        if path.parts[0] == folder
        for problem in (
            *shape_problems(path, (ROOT / path).read_text(), tree_of(path)),
            *import_problems(path),
        )
    ]
    assert not problems, "\n".join(problems)


def test_engines_of_others_are_imported_in_their_own_folders_only() -> None:
    modules = [path for path in tracked(".py") if path.parts[0] in PACKAGES]
    assert not (problems := [each for path in modules for each in engine_problems(path)]), problems


def test_what_connected_engines_share_imports_none_of_them() -> None:
    shared = [path for path in tracked(".py") if path.parent == Path("backends/engine/connected")]
    homes = {home.replace("/", ".") for home in ENGINE_HOMES.values()}
    found = [
        f"{path}: {module}"
        for path in shared
        for module in imported_modules(nodes_of(path))
        if module in ENGINE_HOMES or any(f"{module}.".startswith(f"{home}.") for home in homes)
    ]
    assert shared and not found, found


def test_the_packages_have_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {}
    names = {
        str(p.with_suffix("")).replace("/", ".").removesuffix(".__init__"): p
        for p in tracked(".py")
        if p.parts[0] in PACKAGES
    }
    for name, path in names.items():
        found = imported_modules(tree_of(path).body)
        graph[name] = {m for m in found if m in names and m != name}
        graph[name] -= {name.rsplit(".", 1)[0]}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, "import cycle: " + " -> ".join((*trail, name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_the_tree_speaks_of_no_machine() -> None:
    suspicious = re.compile(r"(^|[^A-Za-z0-9_.~])/(work|root|home)/[A-Za-z0-9_.]")
    found = []
    for suffix in (".py", ".md", ".toml", ".txt", ".pbtxt", ".yaml", ".cfg", "Makefile", "run"):
        for path in tracked(suffix):
            for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
                if suspicious.search(line) and path.name != "test_tidy.py":
                    found.append(f"{path}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_tests_do_not_sleep_to_synchronise() -> None:
    found = [
        f"{path}:{number}"
        for path in tracked(".py")
        if path.parts[0] == "tests" and path.name != "test_tidy.py"
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if "time.sleep(" in line and "poll" not in line
    ]
    assert not found, "wait for a condition instead: " + ", ".join(found)


def test_no_folder_is_too_full_to_look_through() -> None:
    modules = [path for path in tracked(".py") if path.parts[0] in PACKAGES]
    folders = Counter(str(path.parent) for path in modules if path.name != "__init__.py")
    found = [f"{folder}: {n}" for folder, n in folders.items() if n > MODULES_MAX]
    assert not found, f"at most {MODULES_MAX} modules in a folder: " + ", ".join(found)


def test_every_room_says_which_question_it_answers() -> None:
    folders = {path.parent for path in tracked(".py") if path.parts[0] in PACKAGES}
    missing = [
        str(folder)
        for folder in sorted(folders)
        if not list((ROOT / folder).glob("model.py"))
        and not (ROOT / folder / "__init__.py").exists()
    ]
    assert not missing, "a room has an __init__.py: " + ", ".join(missing)


def test_a_class_name_is_there_once() -> None:
    places: dict[str, list[str]] = {}
    for path in tracked(".py"):
        if path.parts[0] in PACKAGES:
            for node in tree_of(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(path))
    del places["TritonPythonModel"]  # Triton wants this name of every model
    twice = [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]
    assert not twice, "\n".join(twice)


def test_identifiers_use_the_words_of_the_field() -> None:
    found = [
        f"{path}: {name}"
        for path in tracked(".py")
        if path.parts[0] in PACKAGES
        for name in names_in(nodes_of(path))
        if DIALECT & set(name.lower().strip("_").split("_"))
    ]
    assert not found, "\n".join(found)


def test_comments_and_pages_use_the_words_of_the_field() -> None:
    found = []
    for path in (*tracked(".py"), *tracked(".md")):
        if path.name in ("CHANGELOG.md", "test_tidy.py"):
            continue
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            if OLD_WORDS.search(WIRE_WORDS.sub("", line)):
                found.append(f"{path}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def names_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
