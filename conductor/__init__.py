"""The conductor: where each request goes, whether it is taken, which prefixes get another copy.

Pure: no clock, no I/O, no randomness. `Conductor` is the door, `messages` what passes through it.
"""

from conductor.conductor import Conductor
from conductor.config import ConductorConfig
from conductor.estimates.estimates import (
    DecodeEstimate,
    DecodeSample,
    PrefillEstimate,
    PrefillSample,
    fit_decode,
    fit_prefill,
)
from conductor.messages import (
    Candidate,
    ConductorStats,
    ErrorPercentiles,
    Prediction,
    Reject,
    Replicate,
    Request,
    Route,
    WorkerRef,
    WorkerStatus,
)

__all__ = [
    "Candidate",
    "Conductor",
    "ConductorConfig",
    "ConductorStats",
    "DecodeEstimate",
    "DecodeSample",
    "ErrorPercentiles",
    "Prediction",
    "PrefillEstimate",
    "PrefillSample",
    "Reject",
    "Replicate",
    "Request",
    "Route",
    "WorkerRef",
    "WorkerStatus",
    "fit_decode",
    "fit_prefill",
]
