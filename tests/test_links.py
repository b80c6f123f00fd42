"""What documents and docstrings point to is there: links, files, modules, experiments.

A file is looked for beside the one that names it, in the folders above, and from the root; a bare
name in a docstring anywhere in the same package or, as a path, from the root of any. Documents of
the past (the changelog, decisions) may name what has gone; their links must lead somewhere.

Not here: whether what they say is so.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("conductor", "mooncake_store", "backends", "loadtest", "bench", "tools", "tests")
OF_THE_PAST = ("CHANGELOG.md", "docs/decisions/")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w.\-/]*\w\.(?:py|md|json|pbtxt|toml|png|xz|csv|trtllm)")
MODULE = re.compile(rf"(?<![\w./-])((?:{'|'.join(PACKAGES)})(?:\.\w+)+)")
TARGET = re.compile(r"make ([a-z][a-z-]*)")
DECISION = re.compile(r"docs/decisions/(\d{4})")
NAMED = re.compile(r"(?<![\w./*<\-])([\w\-]+(?:/[\w\-]+)*\.py)\b")
# Names that belong to others, or of files that are made when the system runs.
OTHER_PACKAGES = ("tensorrt_llm/",)
OTHERS = {
    "bench_index.py",
    "config.json",
    "config.pbtxt",
    "end_to_end_grpc_client.py",
    "generation_config.json",
    "llm_args.py",
    "model.py",
    "params.json",
    "py_executor.py",
    "tokenizer_config.json",
    "triton_python_backend_utils.py",
}


@cache
def tree() -> frozenset[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = {line for line in listed.stdout.splitlines() if (ROOT / line).exists()}
    folders = {str(parent) for line in files for parent in Path(line).parents}
    return frozenset(files | folders)


def tracked(suffix: str) -> list[str]:
    return sorted(line for line in tree() if line.endswith(suffix))


def is_there(name: str, at: str) -> bool:
    """A path, from the folder of `at` or from one above it."""
    above = at.split("/")[:-1]
    return any(
        _flat("/".join([*above[:depth], name.rstrip("/")])) in tree()
        for depth in range(len(above), -1, -1)
    )


def _flat(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            if parts:
                parts.pop()
        elif part not in (".", ""):
            parts.append(part)
    return "/".join(parts)


def slugs(path: str) -> set[str]:
    """The anchors of a document, as web pages of repositories make them."""
    found: set[str] = set()
    for line in (ROOT / path).read_text().splitlines():
        if line.startswith("#"):
            title = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip())
            found.add(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"))
    return found


def broken_links(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        for target in LINK.findall(line):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = _flat(f"{Path(path).parent}/{name}") if name else path
            if file.removesuffix("/") not in tree():
                yield f"{path}:{number}: the link to {target} leads nowhere"
            elif anchor and file.endswith(".md") and anchor not in slugs(file):
                yield f"{path}:{number}: {file} has no heading for #{anchor}"


def missing_names(path: str, text: str) -> Iterator[str]:
    """Files and modules of ours that are quoted in a document."""
    names = {Path(name).name for name in tree()}
    for number, line in enumerate(text.splitlines(), 1):
        for quoted in QUOTED.findall(line):
            for module in MODULE.findall(quoted):
                if not is_module(module):
                    yield f"{path}:{number}: there is no {module}"
            for target in TARGET.findall(quoted):
                if target not in make_targets():
                    yield f"{path}:{number}: there is no `make {target}`"
            if not FILE.fullmatch(quoted) or Path(quoted).name in OTHERS:
                continue
            if quoted.startswith(OTHER_PACKAGES):
                continue
            if not is_there(quoted, path) and ("/" in quoted or quoted not in names):
                yield f"{path}:{number}: there is no {quoted}"


@cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def is_module(name: str) -> bool:
    """A module, or what a module defines."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        base = "/".join(parts[:count])
        if base in tree() or f"{base}.py" in tree():
            rest = parts[count:]
            file = f"{base}.py" if f"{base}.py" in tree() else f"{base}/__init__.py"
            return not rest or (file in tree() and rest[0] in (ROOT / file).read_text())
    return False


def docstrings(source: ast.Module) -> Iterator[tuple[int, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(source):
        if isinstance(node, kinds) and (text := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, text


@cache
def names_in(package: str) -> frozenset[str]:
    return frozenset(name.rsplit("/", 1)[-1] for name in tree() if name.startswith(f"{package}/"))


def is_named_well(name: str, path: str) -> bool:
    """A bare name is of the same package, or of the root; others are paths."""
    if name in OTHERS or is_there(name, path):
        return True
    if "/" in name:
        return any(f"{each}/{name}" in tree() for each in PACKAGES)
    return name in names_in(path.split("/")[0])


def missing_files(path: str, text: str) -> Iterator[str]:
    """Files that docstrings and comments of a module name."""
    for decision in DECISION.findall(text):
        if not any(line.startswith(f"docs/decisions/{decision}-") for line in tree()):
            yield f"{path}: there is no decision {decision}"
    unknown = {name for name in NAMED.findall(text) if not is_named_well(name, path)}
    if not unknown:
        return
    told = list(docstrings(ast.parse(text)))
    told += [
        (number, line.partition("# ")[2])
        for number, line in enumerate(text.splitlines(), 1)
        if "# " in line
    ]
    for number, words in told:
        for name in unknown & set(NAMED.findall(words)):
            yield f"{path}:{number}: no {name} there; write its path, or what it is called now"


def test_links_of_documents_lead_somewhere() -> None:
    found = [
        problem
        for path in tracked(".md")
        for problem in broken_links(path, (ROOT / path).read_text())
    ]
    assert not found, "\n".join(found)


def test_the_index_of_documents_leads_to_all_of_them() -> None:
    index = "docs/README.md"
    linked = {
        _flat(f"docs/{link.partition('#')[0]}") for link in LINK.findall((ROOT / index).read_text())
    }
    of_docs = {page for page in tracked(".md") if page.startswith("docs/")}
    single = {page for page in of_docs if not page.startswith(OF_THE_PAST)} - {index}
    assert len(single) > 20 and not single - linked


def test_each_decision_has_a_number_of_its_own_and_a_line_in_their_index() -> None:
    folder = ROOT / "docs/decisions"
    names = sorted(path.name for path in folder.glob("[0-9]*.md"))
    numbers = [name[:4] for name in names]
    assert len(set(numbers)) == len(numbers), numbers
    listed = re.findall(r"^\| \[(\d{4})\]\((\S+)\)", (folder / "README.md").read_text(), re.M)
    assert sorted(name for _, name in listed) == names
    assert all(name.startswith(number) for number, name in listed), listed


def test_files_and_modules_that_documents_name_are_there() -> None:
    found = [
        problem
        for path in tracked(".md")
        if not path.startswith(OF_THE_PAST)
        for problem in missing_names(path, (ROOT / path).read_text())
    ]
    assert not found, "\n".join(found)


def test_files_that_docstrings_and_comments_name_are_there() -> None:
    found = [
        problem
        for path in tracked(".py")
        for problem in missing_files(path, (ROOT / path).read_text())
    ]
    assert not found, "\n".join(found)
