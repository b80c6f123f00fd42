"""Checks what `kubectl kustomize` makes of folders against the schemas of Kubernetes.

    .venv-kubernetes/bin/python deploy/kubernetes/check_manifests.py FOLDER...

`make kubernetes-check` sets the environment up (the package kubernetes-validate, 108 MB) and checks
all overlays. Custom resources are checked against schemas/KIND-VERSION.json beside this file; a
kind without a schema fails, because the package itself would only warn.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

VERSION = "1.32"  # of Kubernetes: the oldest that these manifests are written for
SCHEMAS = Path(__file__).parent / "schemas"


def kustomized(folder: str) -> Iterator[dict]:
    built = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    if built.returncode:
        raise SystemExit(f"{folder}: {built.stderr.strip()}")
    yield from (each for each in yaml.safe_load_all(built.stdout) if each)


def problem(resource: dict) -> str:
    """What is wrong with it; "" when nothing is."""
    kind, version = str(resource.get("kind")), str(resource.get("apiVersion"))
    try:
        kubernetes_validate.validate(resource, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    except (kubernetes_validate.SchemaNotFoundError, KeyError):
        own = SCHEMAS / f"{kind.lower()}-{version.rpartition('/')[2]}.json"
        if not own.exists():
            return f"nobody knows the kind {kind} of {version}: add {own.name} to {SCHEMAS.name}/"
        try:
            jsonschema.validate(resource, json.loads(own.read_text()))
        except jsonschema.ValidationError as error:
            return f"{'.'.join(map(str, error.path))}: {error.message}"
    return ""


def main(folders: list[str]) -> int:
    failed = 0
    for folder in folders:
        resources = list(kustomized(folder))
        for resource in resources:
            if said := problem(resource):
                failed += 1
                name = resource.get("metadata", {}).get("name")
                print(f"{folder}: {resource.get('kind')}/{name}: {said}")
        print(f"{folder}: {len(resources)} resources against Kubernetes {VERSION}")
        failed += not resources
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
