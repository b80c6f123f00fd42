"""Whether TensorRT-LLM has what this project uses of it: an installed package, or a folder of
sources.

Not here: what is used and how it is compared (doctor/contract/).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from backends.doctor.contract.comparison import compare
from backends.doctor.contract.recorded import read
from backends.doctor.contract.sources import PACKAGE, Sources, SourcesMissing
from backends.doctor.judgement import Finding, broken, note
from backends.engine.trtllm import package
from backends.engine.trtllm.releases import V1, V2, UnknownRelease, kv_manager_of

DRIVING = "backends.doctor.contract.driving"
DRIVING_S_MAX = 60.0
LAYOUT = ("_torch/pyexecutor/connectors/kv_cache_layout.py",)  # only with manager V2
WORDS_SHOWN = 300  # characters of an error message
PAGE = "docs/reference/tensorrt-llm.md"
REMEDY = f"use a release that {PAGE} names, or report this difference"


def contract_findings(folder: Path | None) -> Iterator[Finding]:
    """`folder`: of sources; None: the installed package."""
    try:
        yield from comparison_findings(Sources(folder or installed_folder()))
    except (SourcesMissing, OSError) as error:
        yield broken(PACKAGE, str(error), "name a folder with its sources: --sources FOLDER")


def installed_folder() -> Path:
    package.honour_python_path()
    found = importlib.util.find_spec(PACKAGE) if package.is_installed() else None
    if found is None or not found.submodule_search_locations:
        raise SourcesMissing(f"{PACKAGE} is not installed for {sys.executable}")
    return Path(found.submodule_search_locations[0])


def comparison_findings(sources: Sources) -> Iterator[Finding]:
    subject = f"{PACKAGE} {sources.version or 'of unknown version'}"
    try:
        manager = kv_manager_of(sources.version)
    except UnknownRelease as error:
        manager = V2 if sources.file(LAYOUT) else V1
        yield broken(subject, str(error), f"compared with V{manager}; {PAGE} says what was read")
    contract = read(manager)
    path = sources.file(contract.pieces[0].files)
    if path is None:
        yield broken(subject, "there is no kv_cache_connector.py in it", REMEDY)
        return
    driven = drive(path, manager)
    if driven.problem:
        what = f"its connector manager cannot be run here: {driven.problem}"
        yield note(subject, what, f"see {PAGE}")
    if driven.error:
        yield broken(subject, f"its connector manager cannot be driven: {driven.error}", REMEDY)
    found = compare(contract, sources, driven.calls)
    for difference in found.differences:
        yield broken(subject, str(difference), REMEDY)
    for file in found.unread:
        yield note(subject, f"{file} is not there: not compared", f"{PAGE} says what is used of it")
    same = found.checked - len(found.differences)
    yield Finding(
        subject, f"{same} of {found.checked} facts are as known (KV cache manager V{manager})"
    )


class DrivenManager(NamedTuple):
    calls: list[str] | None  # None: the module could not be run
    error: str = ""  # what ended the calls early
    problem: str = ""  # why the module could not be run


def drive(path: Path, manager: int) -> DrivenManager:
    """`path`: the module that has the connector manager."""
    try:
        ran = subprocess.run(
            [sys.executable, "-m", DRIVING, str(path), str(manager)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DRIVING_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return DrivenManager(None, problem=f"it did not end within {DRIVING_S_MAX:.0f} s")
    with contextlib.suppress(ValueError, IndexError, KeyError, TypeError):
        found = json.loads(ran.stdout.splitlines()[-1])
        return DrivenManager(found["calls"], found["error"])
    said = ran.stderr.strip().splitlines() or [f"it ended with status {ran.returncode}"]
    return DrivenManager(None, problem=said[-1][:WORDS_SHOWN])
