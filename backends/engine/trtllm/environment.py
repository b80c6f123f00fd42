"""The environment that TensorRT-LLM's processes get: no leftovers of MPI, the right GPUs, in turn.

Triton's stub may itself have been started under MPI; an engine that inherits its rank and its
world would wait for peers that are not there. Variables that tune MPI (OMPI_MCA_*) are kept, but
for those that name the inherited job.

Not here: the variable that tells connectors where their worker is (messages.py).
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, MutableMapping
from pathlib import Path

LEFTOVER_NAMES = frozenset({"OMPI_UNIVERSE_SIZE"})
LEFTOVER_PREFIXES = (
    "OMPI_COMM_WORLD_", "PMIX_", "PMI_", "OMPI_MCA_orte_", "ORTE_", "OMPI_MCA_ess_",
)  # fmt: skip


def remove_mpi_leftovers(environment: MutableMapping[str, str]) -> list[str]:
    """Returns the names that were removed."""
    leftover = sorted(
        name for name in environment
        if name in LEFTOVER_NAMES or name.startswith(LEFTOVER_PREFIXES)
    )  # fmt: skip
    for name in leftover:
        del environment[name]
    return leftover


def choose_gpus(environment: MutableMapping[str, str], gpus: str) -> None:
    """Let the engine, and the processes that it starts, see these CUDA devices only.

    Numbers are those of the devices that this process sees itself.
    """
    if not gpus:
        return
    wanted = [int(device) for device in gpus.split(",")]
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if visible:
        if max(wanted) >= len(visible):
            raise ValueError(f"gpus is {gpus}, but this process sees only {','.join(visible)}")
        chosen = ",".join(visible[device] for device in wanted)
    else:
        chosen = ",".join(str(device) for device in wanted)
    environment["CUDA_VISIBLE_DEVICES"] = chosen
    environment["TRTLLM_VISIBLE_DEVICES"] = chosen


@contextlib.contextmanager
def turn_to_start(folder: Path, visible: str) -> Iterator[None]:
    """One engine after the other on each GPU: an engine measures how much memory is free, and one
    that loads its weights meanwhile takes from what it has counted on. `visible` as in
    CUDA_VISIBLE_DEVICES; empty: whatever there is, and then one turn for all."""
    devices = sorted(name for name in visible.split(",") if name) or ["any"]
    with contextlib.ExitStack() as held:  # in one order everywhere, so that nobody waits in a ring
        for device in devices:
            file = held.enter_context((folder / f"gpu-{device}.lock").open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)  # gone with this process, whatever happens to it
        yield


def gpu_names() -> str:
    """The models of this machine's NVIDIA GPUs, as the driver says; "" without one."""
    names = set()
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        for line in path.read_text().splitlines():
            if line.startswith("Model:"):
                names.add(line.partition(":")[2].strip())
    return ", ".join(sorted(names))
