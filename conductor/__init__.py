"""The conductor: routing, admission, and suggestions to copy hot prefixes.

No clock, no I/O, no randomness. `Conductor` decides; messages.py has its inputs and outputs.
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
