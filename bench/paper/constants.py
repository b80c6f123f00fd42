"""The constants of the papers' experiments, in one place, as each report states them.

The constants of the models are in loadtest/simulator/constants.py. This module has the others: how
the coupled baselines are run, and the definitions of the time to the first token and between
tokens.

No experiment has constants of its own. One constant was fitted to the papers' figures: the cost of
each sequence in a decode step, fitted to Figures 14 and 15 of FAST'25 and to no other.
"""

from __future__ import annotations

from dataclasses import replace

from bench.paper.coupled import CoupledSettings
from loadtest.harness.result import Cell
from loadtest.simulator import constants
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.constants import PAPER_NODES

# The papers do not give the chunk size of the chunked baseline: both are run. 512 is best between
# tokens; 2,048 resembles its curve in Figure 1.
SMALL_CHUNK_TOKENS, LARGE_CHUNK_TOKENS = 512, 2_048
SEQUENCES_MAX = 256  # of a batch, vLLM's default
NODES = 16  # of each system, 8x A800 each

# Both count against us: a user may get the first token when it is computed, and then the hand-over
# is only in the first interval. Rows also have the values without either.
HANDOVER_IN_TTFT = True
FIRST_INTERVAL_IN_TBT = True

REPLAY_SPEED = 1.0  # as recorded, unless an experiment varies the speed

VLLM = CoupledSettings("vllm", nodes=NODES, sequences_max=SEQUENCES_MAX)
VLLM_CACHED = replace(VLLM, has_prefix_cache=True)
CHUNKED_SMALL = replace(VLLM, engine="chunked", chunk_tokens=SMALL_CHUNK_TOKENS)
CHUNKED_LARGE = replace(CHUNKED_SMALL, chunk_tokens=LARGE_CHUNK_TOKENS)


def stated(cluster: ClusterSettings = PAPER_NODES) -> dict[str, Cell]:
    """Every constant, those of the models and those of the experiments, by name."""
    return {
        **constants.stated(cluster),
        "baseline_chunk_tokens": f"{SMALL_CHUNK_TOKENS} and {LARGE_CHUNK_TOKENS}",
        "baseline_dispatch": "round_robin",
        "baseline_sequences_max": SEQUENCES_MAX,
        "handover_in_ttft": HANDOVER_IN_TTFT,
        "first_interval_in_tbt": FIRST_INTERVAL_IN_TBT,
        "replay_speed": REPLAY_SPEED,
    }
