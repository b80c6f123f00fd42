"""Machine profile: the engine's speed on this machine, measured once and saved on disk.

The conductor predicts the seconds of prefill and decode steps. So each worker registers
coefficients, fitted to a short measurement of its engine (`Driver.measure`) with its number of
threads. The first worker of a role measures under a file lock, so that workers that start together
do not disturb the measurement. Later workers read the saved file. Delete it to measure again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from backends.workers.driver import Driver
from conductor.estimates import estimates

log = logging.getLogger(__name__)
VERSION = 2  # increment it when the measured points, the formulas or the kernels change
BUDGET_S = 4.0  # time limit of a measurement


@dataclass(frozen=True, slots=True)
class MachineProfile:
    prefill: tuple[float, ...]  # conductor.estimates.PrefillEstimate coefficients
    decode: tuple[float, ...]  # conductor.estimates.DecodeEstimate coefficients
    error: float  # mean relative error of the fit


def load_or_measure(
    driver: Driver[Any, Any], role: str, threads: int, state_dir: Path
) -> MachineProfile:
    """The profile of (hardware, model, layers, role, threads), read from disk if it is there."""
    engine, hardware = driver.engine, driver.hardware or cpu_model()
    folder = state_dir / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    share = () if len(engine.layers) == engine.layout.layers else (engine.layers,)
    model = (engine.model_id, engine.weights_id, engine.layout, engine.tp_shape)
    identity = repr((VERSION, hardware, *model, role, threads, *share))
    name = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    path = folder / f"{role}-{name}.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            try:
                return msgspec.json.decode(path.read_bytes(), type=MachineProfile)
            except (msgspec.MsgspecError, ValueError):
                log.warning("%s is damaged, measuring again", path)
        profile = measure(driver, role)
        partial = path.with_suffix(".tmp")
        partial.write_bytes(msgspec.json.encode(profile))
        partial.replace(path)
    return profile


def measure(driver: Driver[Any, Any], role: str) -> MachineProfile:
    """Measure this role's steps for up to BUDGET_S and fit the coefficients."""
    measured = driver.measure(BUDGET_S)
    if role == "prefill":
        prefill = estimates.fit_prefill([estimates.PrefillSample(*each) for each in measured])
        return MachineProfile(prefill.estimate.coefficients, (), prefill.error_mean)
    decode = estimates.fit_decode([estimates.DecodeSample(*each) for each in measured])
    return MachineProfile((), decode.estimate.coefficients, decode.error_mean)


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
