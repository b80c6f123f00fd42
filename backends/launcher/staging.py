"""The folder of Triton backends that one server runs from.

Triton wants `<backend-directory>/python/` with real copies of its Python backend (a symbolic
link is refused) and one folder per backend of ours beside it. Here: making that folder.
"""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

from backends.launcher.environment import TritonInstall

OUR_BACKENDS = ("preprocessing", "postprocessing", "conductor", "prefill", "decode")


def stage(triton: TritonInstall, folder: Path) -> Path:
    """Fill `folder` with the Python backend and ours; returns it, for --backend-directory."""
    if folder.exists():
        shutil.rmtree(folder)
    python = folder / "python"
    python.mkdir(parents=True)
    for source in triton.python_backend.iterdir():
        if source.suffix in (".so", ".py"):
            shutil.copyfile(source, python / source.name)
    stub = python / "triton_python_backend_stub"
    shutil.copyfile(triton.stub, stub)
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP)
    ours = Path(__file__).parents[1]
    for name in OUR_BACKENDS:
        (folder / name).mkdir()
        shutil.copyfile(ours / name / "model.py", folder / name / "model.py")
    return folder
