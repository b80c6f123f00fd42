"""The conductor: where each request goes, whether it is taken, which prefixes get another copy.

Pure: no clock, no I/O, no randomness. `Conductor` decides; `messages` is what it hears and says.
"""

from conductor.conductor import Conductor
from conductor.config import ConductorConfig
from conductor.messages import Candidate, Prediction, Reject, Replicate, Request, Route

__all__ = [
    "Candidate",
    "Conductor",
    "ConductorConfig",
    "Prediction",
    "Reject",
    "Replicate",
    "Request",
    "Route",
]
