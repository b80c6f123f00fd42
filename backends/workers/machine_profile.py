"""How fast this very machine computes: measured once, kept on disk, read by every worker.

The conductor predicts in seconds, so each worker registers with coefficients fitted to a short
measurement of its own engine (backends/engine/calibration.py) with its own number of threads. The
first worker of a role measures under a file lock, so that workers that start together do not
disturb each other's numbers; the others read the file. Delete the file to measure again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from backends.engine import calibration
from backends.engine.interface import Engine
from conductor.estimates import estimates

log = logging.getLogger(__name__)
VERSION = 1  # raise it when the points or the formulas change
BUDGET_S = 4.0
PREFILL_POINTS = ((16, 0), (64, 0), (256, 0), (512, 0), (64, 1024), (256, 1024), (512, 2048))
DECODE_POINTS = ((1, 64), (1, 1024), (4, 512), (8, 256), (16, 256))


@dataclass(frozen=True, slots=True)
class MachineProfile:
    prefill: tuple[float, ...]  # conductor.estimates.PrefillEstimate coefficients
    decode: tuple[float, ...]
    error: float  # mean relative error of the fit


def load_or_measure(engine: Engine, role: str, threads: int, state_dir: Path) -> MachineProfile:
    """The profile of (machine, model, role, threads), from disk where it was measured before."""
    folder = state_dir / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.blake2b(
        repr((VERSION, hardware(engine), engine.model_id, engine.weights_id, engine.layout,
              role, threads)).encode(), digest_size=8).hexdigest()  # fmt: skip
    path = folder / f"{role}-{name}.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            try:
                saved = json.loads(path.read_text())
                return MachineProfile(
                    tuple(saved["prefill"]), tuple(saved["decode"]), saved["error"]
                )
            except (ValueError, KeyError):
                log.warning("%s is damaged, measuring again", path)
        profile = measure(engine, role)
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(asdict(profile)))
        partial.replace(path)
    return profile


def measure(engine: Engine, role: str) -> MachineProfile:
    """A few seconds of work of this role, fitted."""
    if role == "prefill":
        if hasattr(engine, "measured_prefill"):  # an engine that batches by itself
            measured = engine.measured_prefill(BUDGET_S)
        else:
            points = [(new, before) for new, before in PREFILL_POINTS
                      if new + before <= engine.context_tokens_max]  # fmt: skip
            measured = calibration.measure_prefill(engine, points, budget_s=BUDGET_S)
        prefill = estimates.fit_prefill([estimates.PrefillSample(*each) for each in measured])
        return MachineProfile(prefill.estimate.coefficients, (), prefill.error_mean)
    if hasattr(engine, "measured_decode"):
        measured = engine.measured_decode(BUDGET_S)
    else:
        measured = calibration.measure_decode(engine, list(DECODE_POINTS), budget_s=BUDGET_S)
    decode = estimates.fit_decode([estimates.DecodeSample(*each) for each in measured])
    return MachineProfile((), decode.estimate.coefficients, decode.error_mean)


def hardware(engine: Engine) -> str:
    """What computes: the engine knows it where it is not this CPU."""
    return getattr(engine, "hardware", "") or cpu_model()


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
