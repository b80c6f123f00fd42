"""A profile of a small worker, as if it had been measured."""

from __future__ import annotations

from pathlib import Path

from conductor.estimates.estimates import (
    DecodeEstimate,
    DecodeSample,
    PrefillEstimate,
    PrefillSample,
)
from loadtest.profile.profile import BurstMeans, Profile, Serving, Sharing

PREFILL = PrefillEstimate(0.004, 4e-5, 1e-9)
DECODE = DecodeEstimate(0.004, 3e-4, 2e-7)


def profile(cores: int = 2, shared: float = 1.4) -> Profile:
    settings = {
        "block_tokens": "64",
        "chunk_tokens": "512",
        "slots": "32",
        "kv_pages": "512",
        "token_bytes": "4096",
        "threads": "1",
        "cores": str(cores),
        "checkpoint": "demo",
        "dtype": "float32",
        "device": "cpu",
    }
    prefills = [(64, 0), (512, 0), (256, 512), (512, 1_024), (128, 2_048)]
    decodes = [(1, 80), (4, 2_048), (16, 8_192), (8, 900)]
    burst = BurstMeans((256, 1024, 64, 512), 16, 0.07, 0.02, 0.009)
    return Profile(
        f"a machine, {cores} cores",
        settings,
        [PrefillSample(new, prefix, PREFILL.seconds(new, prefix)) for new, prefix in prefills],
        [DecodeSample(n, context, DECODE.step_s(n, context)) for n, context in decodes],
        Serving(0.006, 1e-6, 0.003),
        Sharing(shared, shared),
        burst,
    )


def write_profile(folder: Path, cores: int = 2, shared: float = 1.4) -> Path:
    path = folder / "profile.json"
    path.write_text(profile(cores, shared).to_json() + "\n")
    return path
