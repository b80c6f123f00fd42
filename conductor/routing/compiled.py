"""One routing decision in one call of compiled code: all predicted times, and the best pair.

fetching.py and routing.py define the same computation with numpy. Compiled code (native.c) gives
the same result to the last bit (tests/conductor/routing/test_compiled.py), because both apply the
same operations to the same columns. The compiled code makes one pass instead of a hundred numpy
calls. It reads the columns of the pools (load/pool.py) by address. The addresses are looked up
again when a pool has new arrays (Pool.version). Output columns are valid until the next decision.

Without a compiler there is no `CompiledDecision`, and numpy decides. While workers warm up, and
with the policy `random`, numpy chooses the pair from the compiled terms.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.load.cluster import PATHS_PER_TICK, Cluster
from conductor.load.decode_batch import DecodeLoad
from conductor.load.pool import REQUESTS_RANK, Mask
from conductor.load.worker import WorkerState
from conductor.messages import AppliedLimits, Request
from conductor.queue_order import QueueOrder
from conductor.routing.fetching import EVICTION_COST_SHARE, SOURCES_MAX, FetchSource, Plans
from conductor.routing.policies import POLICIES, Terms
from conductor.routing.tiers import Holdings
from mooncake_store.native.library import NativeFunction, quick_function

# (cluster, decode workers, end of the prefill, now) -> loads without the new request
Loads = Callable[[Cluster, Sequence[WorkerState], float, float], list[DecodeLoad]]


class RouteQuery(NamedTuple):  # a frozen dataclass would take a microsecond longer to make
    """One request, the workers that may take it, and the limits that admission sets."""

    cluster: Cluster
    request: Request
    usable: tuple[Mask, Mask]  # candidate prefill and decode workers, at least one of each
    loads: Loads | None  # computes the loads that admission checks; None: the reserved loads
    order: QueueOrder  # computes the order key of the request
    limits: AppliedLimits  # admission rejects pairs with higher predicted times
    now_s: float


PARTNERS_MAX = 64  # largest finalists_max that native.c supports
COSTS = {"load_balance": 0, "cache_aware": 1, "kvcache_centric": 1, "adaptive": 2, "random": 0}
FETCHES = {"never": 0, "threshold": 1, "times": 2}
NUMBER, REAL, ADDRESS = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
Array = npt.NDArray[Any]

# The members of decision_t by C type, in the order of native.c. They are described there.
FLEET = {
    NUMBER: "prefills decodes has_groups has_one_block_size",
    ADDRESS: (
        "ratio base_s per_token_s half_pair_s block_tokens block_bytes busy_until_s "
        "unattributed_until_s head_key_s half_step_s waiting_s rank length keys_s work_s has_room "
        "is_beside_decode others hops_s chunk_tokens beside_share beside_from_tokens node path_s "
        "own_from own decode_per_token_s decode_step_s pages_free decode_rank decode_block_tokens"
    ),
}
CONFIG = {
    REAL: "tie_ratio tie_s ssd_bytes_per_s balancing_threshold eviction_cost_share requests_rank",
    NUMBER: "must_pay finalists_max",
}
FILLED = {
    ADDRESS: (
        "queue_s wait_s fetch_s transfer_s prefill_s fill_s delay_s start_s eviction_cost_s "
        "beside_s source decode_has_room busy_s behind own_s least_s cost_s decode_cost_s "
        "decode_whole_s candidates is_choice"
    )
}
REQUEST = {
    NUMBER: "cost fetch is_blind spares_others wants_pair",
    ADDRESS: "blocks dram_blocks full is_prefill is_decode may_join rooms",
    REAL: "now_s prompt_tokens longest_tokens spread stretch wait_s_max ttft_limit_s near_s far_s",
}


def _members(parts: Mapping[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in parts.items() for name in names.split()]


class _Source(ctypes.Structure):
    _fields_ = (("path_s", ADDRESS), ("blocks", REAL), ("dram_blocks", REAL), ("wait_s", REAL))


class _Decision(ctypes.Structure):
    """`decision_t` of native.c."""

    _fields_ = (
        *_members(FLEET),
        *_members(CONFIG),
        *_members(FILLED),
        *_members(REQUEST),
        ("sources", NUMBER),
        ("sources_of", _Source * SOURCES_MAX),
        ("first", NUMBER),
        ("prefill", NUMBER),
        ("decode", NUMBER),
        ("backlog_s", REAL),
        ("handover_s", REAL),
        ("described", NUMBER * 11),
    )


ASKED, SENDER, ANSWER = (
    struct.Struct("=12q9dq"),
    struct.Struct("=qddd"),
    struct.Struct("=qqdd2dq8d"),
)


# Row of the prefill worker, row of the decode worker, mean queued work of a prefill worker (s),
# hand-over of the pair (s), and then the fields of PrefillTerms. If no pair was requested, only the
# mean queued work is valid.
Answer = tuple[Any, ...]


class CompiledDecision:
    """The arguments of native.c's `decide` for one cluster, updated when its pools change."""

    @classmethod
    def of(cls, cluster: Cluster) -> CompiledDecision | None:
        """None without compiled code, or if native.c does not support this configuration."""
        made = [quick_function(name, NUMBER, [ADDRESS]) for name in ("decide", "choose_pair")]
        decide, choose_pair = made
        config = cluster.config
        is_known = config.policy in COSTS and config.finalists_max <= PARTNERS_MAX
        if decide is None or choose_pair is None or not is_known:
            return None
        return cls(cluster, decide, choose_pair)

    def __init__(
        self, cluster: Cluster, decide: NativeFunction, choose_pair: NativeFunction
    ) -> None:
        self._cluster, self._decide, self._choose_pair = cluster, decide, choose_pair
        config = cluster.config
        policy = POLICIES[config.policy]
        self._kind = (
            COSTS[config.policy],
            FETCHES[policy.fetch],
            int(policy.is_blind),
            int(policy.spares_others),
        )
        self._arguments = arguments = _Decision(
            tie_ratio=config.tie_ratio,
            tie_s=config.tie_s,
            ssd_bytes_per_s=config.ssd_bytes_per_s,
            balancing_threshold=config.kvcache_balancing_threshold,
            eviction_cost_share=EVICTION_COST_SHARE,
            requests_rank=REQUESTS_RANK,
            must_pay=config.fetch_must_pay,
            finalists_max=config.finalists_max,
        )
        self._address = ctypes.c_void_p(ctypes.addressof(arguments))
        self._versions = (-1, -1)
        self._kept: dict[str, Array] = {}  # the arrays whose addresses native.c has
        self._is_prefill = self._is_decode = np.zeros(0, bool)
        self._masks = (0, 0)  # addresses of `_is_prefill` and `_is_decode`

    def decide(
        self,
        query: RouteQuery,
        held: Holdings,
        sources: Sequence[FetchSource],
        may_join: Mask,
        spread: int,
        wants_pair: bool,
    ) -> Answer:
        """Fill `terms`, `plans` and `has_room`. `wants_pair`: True to find the best pair as well.
        `may_join`: mask of the candidate decode workers that did not refuse a request recently.
        `spread`: the expected number of output tokens."""
        cluster = self._cluster
        prefills, decodes = cluster.prefills, cluster.decodes
        if (prefills.version, decodes.version) != self._versions:
            self._look_up()
        request, order = query.request, query.order
        is_prefill, is_decode = query.usable
        if is_prefill is not self._is_prefill or is_decode is not self._is_decode:
            self._is_prefill, self._is_decode = query.usable
            self._masks = (is_prefill.ctypes.data, is_decode.ctypes.data)
        joinable = self._masks[1] if may_join is is_decode else may_join.ctypes.data
        tokens = request.prompt_tokens
        ASKED.pack_into(
            self._arguments,
            ASKED_AT,
            *self._kind,
            wants_pair,
            *held.addresses,
            *self._masks,
            joinable,
            self._has_room_address,
            query.now_s,
            tokens,
            tokens + request.output_tokens_max,
            spread,
            order.stretch,
            order.wait_s_max,
            query.limits.ttft_predicted_s,
            *decodes.paths_s_least(tokens),
            len(sources),
        )
        at = SOURCES_AT
        for source in sources:
            path = prefills.path(source.node_id).address
            SENDER.pack_into(
                self._arguments, at, path, source.blocks, source.dram_blocks, source.wait_s
            )
            at += SENDER.size
        if (row := self._decide(self._address)) >= 0:
            self._choose_after(row)
        self.plans = Plans(held, sources, *self._plans)
        return ANSWER.unpack_from(self._arguments, ANSWER_AT)

    def choose(self, has_room: Mask) -> Answer:
        """Choose the pair after `decide`, among the decode workers of this mask."""
        self._arguments.rooms = has_room.ctypes.data
        self._choose_after(self._choose_pair(self._address))
        return ANSWER.unpack_from(self._arguments, ANSWER_AT)

    def _choose_after(self, row: int) -> None:
        """Look up missing paths and choose again, until `row` is negative. `row`: row of a prefill
        worker whose path native.c needs, negative if none is missing."""
        while row >= 0:
            self._look_up_path(self._cluster.prefills.node_ids[row])
            row = self._choose_pair(self._address)

    def prepare(self) -> None:
        """Look up paths before decisions need them."""
        if (self._cluster.prefills.version, self._cluster.decodes.version) != self._versions:
            self._look_up()
        missing = np.flatnonzero(self._kept["path_s"] == 0)[:PATHS_PER_TICK].tolist()
        for row in missing:
            self._look_up_path(self._cluster.prefills.node_ids[row])

    def _look_up(self) -> None:
        """Point the arguments at the new arrays of the pools."""
        prefills, decodes = self._cluster.prefills, self._cluster.decodes
        self._versions = (prefills.version, decodes.version)
        count, node_ids = len(prefills.workers), prefills.node_ids
        beside = [decodes.on_node(node_id) for node_id in node_ids]
        own = [row for rows in beside for row in rows]
        kept = self._kept = {
            **prefills.compared(),
            **decodes.compared(),
            "is_beside_decode": self._cluster.is_beside_decode,
            "node": np.array([prefills.on_node(name)[0] for name in node_ids], np.int64),
            "path_s": np.zeros(count, np.int64),
            "own_from": np.array([0, *map(len, beside)], np.int64).cumsum(),
            "own": np.array(own, np.int64),
            **self._new_columns(count, len(decodes.workers)),
        }
        for name, array in kept.items():
            assert array.flags.c_contiguous, name
            setattr(self._arguments, name, array.ctypes.data)
        arguments = self._arguments
        arguments.prefills, arguments.decodes = count, len(decodes.workers)
        arguments.has_groups = prefills.has_groups
        arguments.has_one_block_size = bool(decodes.block_tokens)
        self.terms = Terms(*(kept[name] for name in Terms._fields))
        of_plans = ("fetch_s", "prefill_s", "source", "fill_s", "eviction_cost_s", "beside_s")
        self._plans: tuple[Any, ...] = tuple(kept[name] for name in of_plans)
        self.has_room = kept["decode_has_room"]
        self._has_room_address = self.has_room.ctypes.data

    def _new_columns(self, prefills: int, decodes: int) -> dict[str, Array]:
        """The output columns."""
        made: dict[str, Array] = {}
        for name in FILLED[ADDRESS].split():
            count = decodes if name.startswith("decode_") else prefills
            made[name] = np.zeros(count + 1)[:count]
        made["source"], made["candidates"] = (
            np.zeros(prefills, np.int64),
            np.zeros(3 * prefills + 2, np.int64),
        )
        made["decode_has_room"] = np.zeros(decodes, bool)
        made["is_choice"] = np.zeros(prefills, np.uint8)
        return made

    def _look_up_path(self, node_id: str) -> None:
        address = self._cluster.decodes.path(node_id).address
        for row in self._cluster.prefills.on_node(node_id):
            self._kept["path_s"][row] = address


ASKED_AT, SOURCES_AT = _Decision.cost.offset, _Decision.sources_of.offset
ANSWER_AT = _Decision.prefill.offset
