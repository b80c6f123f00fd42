"""Records what real connectors of TensorRT-LLM look like, without importing them.

    python -m tests.tools.record_trtllm_witnesses

The wheels of lmcache and kvbm are on the ordinary package index and hold connectors that work with
TensorRT-LLM. This downloads them (33 MB), reads their sources with `ast`, and writes which classes
they derive, from which module, with which methods and arguments, and what they use of requests to
tests/data/trtllm_witnesses.json. Tests compare that with our connector and with the stand-in.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "data" / "trtllm_witnesses.json"
WHEELS = ("lmcache==0.5.6", "kvbm==1.6.1", "kvbm==1.1.1")  # 1.1.1: where 1.2.x has the API
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64")
BASES = ("KvCacheConnectorScheduler", "KvCacheConnectorWorker")
REQUESTS = ("request", "req", "request_data", "scheduler_output")  # names of what is handed in


def download(requirement: str, folder: Path) -> Path:
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version=3.12",
            *platforms,
            "--dest",
            str(folder),
            requirement,
        ],
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def witnesses_of(requirement: str, wheel: Path) -> list[dict[str, Any]]:
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py"):
                source = archive.read(name).decode()
                if any(base in source for base in BASES):
                    found += witnesses_in(requirement, name, ast.parse(source))
    return found


def witnesses_in(requirement: str, file: str, tree: ast.Module) -> list[dict[str, Any]]:
    modules = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and {a.name for a in node.names} & set(BASES)
    }
    found = []
    for node in tree.body:
        bases = [b.id for b in getattr(node, "bases", []) if isinstance(b, ast.Name)]
        if isinstance(node, ast.ClassDef) and set(bases) & set(BASES):
            found.append(
                {
                    "wheel": requirement,
                    "file": file,
                    "module": sorted(module for module in modules if module),
                    "class": node.name,
                    "base": bases[0],
                    "methods": methods_of(node),
                    "uses": uses_of(node),
                }
            )
    return found


def methods_of(node: ast.ClassDef) -> dict[str, list[str]]:
    return {
        each.name: [argument.arg for argument in each.args.args]
        for each in node.body
        if isinstance(each, ast.FunctionDef)
    }


def uses_of(node: ast.ClassDef) -> list[str]:
    """Attributes of requests and of what is scheduled."""
    return sorted(
        {
            each.attr
            for each in ast.walk(node)
            if isinstance(each, ast.Attribute)
            and isinstance(each.value, ast.Name)
            and each.value.id in REQUESTS
        }
    )


def main() -> None:
    found = []
    for requirement in WHEELS:
        with tempfile.TemporaryDirectory() as folder:
            found += witnesses_of(requirement, download(requirement, Path(folder)))
    TARGET.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} connectors of {len(WHEELS)} wheels -> {TARGET}")


if __name__ == "__main__":
    main()
