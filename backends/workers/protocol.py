"""Protocol between frontends and workers.

*Calls* are requests to the models `prefill_*` and `decode_*` over gRPC (grpc_calls.py). Token ids
are a tensor, all other fields one MessagePack string. `CallLimits` validates them in the worker.

*Messages* go over ZeroMQ to the inbox of one process. While a config.pbtxt reloads, two processes
serve the same model name, so a name would not identify the receiver. Messages may be lost. An
announcement only saves time, a stop is sent again, and a gap in the tokens is detected
(token_streams.py). A pipeline group, prefill workers that each compute some of the layers, starts a
new epoch (pipeline/group.py). An inbox drops messages without the secret that the processes of one
launch or deployment share (launch_secret.py).

Not here: the store's protocol (mooncake_store/wire/directory_protocol.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from backends import launch_secret
from backends.engine.sampling_params import SamplingLimits, SamplingParams
from backends.errors import InvalidRequest, WorkerGone
from backends.token_logprobs import PromptLogprobs, TokenLogprobs
from mooncake_store.records.blocks import Copy, Slot
from mooncake_store.wire.mailbox import MESSAGE_BYTES_MAX, Inbox, Outbox
from mooncake_store.wire.unix_socket import PATH_BYTES_MAX

# Names of the worker models' tensors.
REQUEST_IDS, REQUEST_BODY, REQUEST_STOP = "input_ids", "request", "stop"
REPLY_IDS, REPLY_BODY = "output_ids", "reply"

# Each call has this parameter. A release that changes the meaning of calls increments the version.
VERSION_PARAMETER, CALLS_VERSION = "protocol_version", 3

REQUEST_ID_CHARACTERS_MAX = 256
ADDRESS_VARIABLE = "MOONCAKE_ADDRESS"  # this host's address for other hosts; unset: single host
LISTEN_VARIABLE = "MOONCAKE_LISTEN"  # the address to bind, if not MOONCAKE_ADDRESS
PEERS_VARIABLE = "MOONCAKE_PEERS"  # addresses of the deployment's hosts, comma separated
ANY_PEER = "*"  # an entry of MOONCAKE_PEERS: any host may join
HEARTBEAT_S = 5.0  # interval of a worker's Heartbeat messages
GAP_S_MAX = 0.1  # upper bound of `gap_s`, for any number of streams


class BlockRef(msgspec.Struct, frozen=True, array_like=True):
    """Location of block `index` of a request's KV in the store."""

    index: int
    node_id: str  # storage node
    slot: int  # in the node's memory segment
    generation: int  # of the slot's content; each use of the slot has another generation
    checksum: int  # of the whole block; 0 if only some layers are written


class PrefillRequest(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute the KV of input_ids and sample one token. In a request that resumes after a lost
    attempt, the output tokens that the client already has follow the prompt in input_ids."""

    request_id: str  # of this attempt; a further attempt has another id
    prompt_tokens: int  # 1 <= prompt_tokens <= len(input_ids)
    sampling: SamplingParams
    cache_salt: str  # part of the block keys, so that tenants share no KV
    fetch_blocks: int  # most blocks, after the locally cached ones, to fetch from other nodes
    decode_inbox: str  # inbox of the decode worker for LayersReady; "": announce no layers
    reply_inbox: str  # inbox of the frontend for a FirstToken before the reply; "": send none
    reserve_tokens: int  # KV tokens for which the decode worker reserves pages
    place_s: float = 0.0  # queue order key minus arrival time (conductor/queue_order.py)
    is_resumed: bool = False  # True after a lost attempt: a full queue accepts the request anyway
    # Source nodes of the fetch: the conductor's choice, then its second choice. A block that these
    # nodes lack or fail to send is fetched from any other node that has it.
    fetch_nodes: list[str] = []
    trace_id: str = ""  # for the worker's log
    near_blocks: int = 0  # leading blocks in the local node's memory at the conductor's decision
    # Request ids of further answers to this prompt. Answer i samples by `sampling.of_answer(i)`;
    # this request is answer 0. Each id gets leases on the blocks.
    copies: list[str] = []


class CopyToken(msgspec.Struct, frozen=True, array_like=True):
    """The first token of a further answer to a prompt."""

    token_id: int
    logprobs: list[TokenLogprobs] = []  # of the token, if requested


class PrefillReply(msgspec.Struct, frozen=True, tag="prefilled"):
    """The prompt's KV is stored, or handed over by `native`. `output_ids` is the sampled token."""

    incarnation: str  # of the worker process
    cached_tokens: int  # leading tokens whose KV was loaded instead of computed
    fetched_blocks: int  # blocks brought from other nodes, or from the local node's SSD
    fetched_bytes: int
    blocks: list[BlockRef]  # all KV of the request; the last block may be partial
    queue_s: float  # from the arrival to the last chunk, without `load_s` and `compute_s`
    load_s: float  # loading the cached prefix
    compute_s: float
    put_s: float  # from the end of the computation to this reply
    queue_ahead: int = 0  # prompts before this one in the queue order at its arrival
    native: bytes = b""  # hand-over data of an engine that moves KV by itself; b"": use `blocks`
    fetched_from: dict[str, int] = {}  # node -> bytes fetched for this request
    load_at_s: float = -1.0  # from the arrival to the start of the latest load; -1: unknown
    compute_at_s: float = -1.0  # from the arrival to the start of the first chunk; -1: unknown
    logprobs: list[TokenLogprobs] = []  # of the sampled token, if requested
    # One for each of PrefillRequest.copies. Empty if the engine samples one token of a prompt; each
    # copy is then a request of its own.
    copies: list[CopyToken] = []
    prompt_logprobs: PromptLogprobs = PromptLogprobs()


class DecodeRequest(msgspec.Struct, frozen=True, tag="decode"):
    """Decode the tokens after input_ids. The KV of all input_ids but the last is in `blocks`, or
    the engines move it themselves (`native`)."""

    request_id: str  # the same as in the attempt's PrefillRequest
    prompt_tokens: int  # the further input_ids are output tokens
    sampling: SamplingParams
    cache_salt: str  # as in PrefillRequest
    blocks: list[BlockRef]
    stream_interval: int  # tokens per message; 0: all tokens in the reply
    reply_inbox: str  # inbox of the frontend for messages before the reply
    tbt_slo_s: float = 0.0  # reject the request if a step with it would take longer; 0: no limit
    native: bytes = b""  # PrefillReply.native
    is_resumed: bool = False  # as in PrefillRequest
    # Logprobs of the last of input_ids, if requested. If the token's text may begin a stop word, no
    # client has it yet, and this worker sends the token later, with these logprobs.
    first_logprobs: list[TokenLogprobs] = []
    trace_id: str = ""  # for the worker's log
    priority: int = 0  # requests of higher priority go first, and may preempt those of lower
    # Limit on the frontend's messages to all its clients, per second; 0: no limit. The worker also
    # keeps the resulting gaps (`gap_s`), so that a message has the tokens of several steps.
    messages_per_s_max: float = 0.0


class DecodeReply(msgspec.Struct, frozen=True, tag="decoded", omit_defaults=True):
    """The end of a request. `output_ids` (a tensor) are the tokens that no earlier message had."""

    incarnation: str  # of the worker process
    tokens_before: int  # decoded tokens in messages before this reply
    text: str  # of the reply's tokens; with the next two fields as in text_stream.OutputDelta
    context_ids: list[int]
    cut_bytes: int
    finish_reason: str  # "end_id" | "stop_word" | "length" | "cancelled"
    queue_s: float = 0.0  # from the arrival to the load of the handed-over KV
    load_s: float = 0.0
    loaded_early_blocks: int = 0  # blocks that were complete in the pages when the load began
    read_bytes: dict[str, int] = {}  # transport -> bytes read for the request
    logprobs: list[TokenLogprobs] = []  # of each token in the reply, or empty


class WorkerFailure(msgspec.Struct, frozen=True, tag="failed"):
    """Sent instead of a reply if the request failed. Errors of Triton are not used, because they
    have no class, and Triton 2.51 may lose an error that follows other responses."""

    message: str  # of ServingError.wire_message, with the error's class


class LayersReady(msgspec.Struct, frozen=True, tag="layers"):
    """One layer of these blocks is in the store (prefill worker -> decode worker)."""

    request_id: str
    kv_tokens: int  # tokens of the request whose KV the prefill worker hands over
    reserve_tokens: int  # KV tokens for which the decode worker reserves pages
    layer: int  # -1: all layers, and the checksums are in the BlockRefs
    blocks: list[BlockRef]
    checksums: list[int]  # of the layer in each of `blocks`; empty if `layer` is -1


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Stop a request, also one that arrives only later (frontend -> worker)."""

    request_id: str
    reason: str  # why the frontend stops the request; the worker does not use this text


class DrainWorker(msgspec.Struct, frozen=True, tag="drain"):
    """Begin or end the drain of a worker (operator -> worker)."""

    is_on: bool  # True: reject new requests; False: accept them again
    moves: bool = False  # True: also fail current requests, so that they resume on other workers


class TakeRole(msgspec.Struct, frozen=True, tag="take_role"):
    """Finish all requests, then register as a worker of this role (frontend -> worker)."""

    role: str  # "prefill" | "decode"
    incarnation: str  # of the receiver; a process of another incarnation ignores the message


class TokenUpdate(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request, in the order of decoding."""

    request_id: str
    tokens_before: int  # tokens in earlier messages of this request; a gap shows a lost message
    token_ids: list[int]
    text: str  # of token_ids; with the next two fields as in text_stream.OutputDelta
    context_ids: list[int]
    cut_bytes: int
    logprobs: list[TokenLogprobs] = []  # of each token, or empty


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """New tokens of all streams of one frontend (decode worker -> frontend)."""

    incarnation: str
    updates: list[TokenUpdate]


class FirstToken(msgspec.Struct, frozen=True, tag="first"):
    """The first token of a prompt whose KV is not stored yet (prefill worker -> frontend). Sent
    only if the token cannot end the output."""

    request_id: str
    token_id: int
    cached_tokens: int  # as in PrefillReply
    logprobs: list[TokenLogprobs] = []  # of the token, if requested


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """These requests of one frontend are queued or running (worker -> frontend)."""

    incarnation: str
    request_ids: list[str]


class GroupBegins(msgspec.Struct, frozen=True, tag="group"):
    """An epoch of a pipeline group begins (stage 0 -> each other pipeline stage). The receiver
    finishes or drops all work of earlier epochs, and then sends StageBeat."""

    epoch: str  # also in every later message of this epoch; messages of other epochs are dropped
    first_inbox: str  # inbox of stage 0
    next_inbox: str  # inbox of the next stage; "" for the last stage
    chunk_tokens: int  # tokens of the longest step


class StageBeat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat of a pipeline stage (-> stage 0)."""

    epoch: str  # "": the stage is in no epoch, for example because it missed a step
    stage: int  # number of the sender, 1 or more
    incarnation: str


class PrefixWanted(msgspec.Struct, frozen=True, tag="prefix_wanted"):
    """Read the receiver's layers of cached blocks into its pages (stage 0 -> each other stage)."""

    epoch: str
    number: int  # of this load; PrefixLoaded repeats it
    copies: list[Copy]
    pages: list[int]  # pages[i] is for copies[i]; the same in every stage


class PrefixLoaded(msgspec.Struct, frozen=True, tag="prefix_loaded"):
    """Answer to PrefixWanted (-> stage 0): the load is over, and nothing writes the pages."""

    epoch: str
    stage: int
    number: int
    blocks: int  # leading blocks that are in the pages


class SampleInputs(msgspec.Struct, frozen=True, array_like=True):
    """Inputs of the last stage for sampling, if a step completes a prompt."""

    sampling: SamplingParams
    prompt_ids: bytes  # int32
    output_ids: bytes  # int32


class StageWork(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of a step, and the slots for the KV of the blocks that it completes."""

    request_id: str
    start: int  # position of the chunk's first token in the prompt
    tokens: int
    pages: list[int]  # pages of block 0 to the chunk's last block
    kv_tokens: int  # this and the next two fields are for LayersReady messages
    reserve_tokens: int
    decode_inbox: str
    slots: list[tuple[int, Slot]]  # (block, slot) of each completed block that the store lacks
    last: SampleInputs | None = None  # None: the chunk is not its prompt's last


class StageStep(msgspec.Struct, frozen=True, tag="step"):
    """A step of a pipeline group (stage -> next stage). Its hidden states are attached."""

    epoch: str
    number: int  # 0, 1, 2, ... within an epoch
    works: list[StageWork]
    error: str = ""  # error of an earlier stage, which sends no hidden states; "": no error


class StageComputed(msgspec.Struct, frozen=True, tag="computed"):
    """The last stage has computed a step (-> stage 0)."""

    epoch: str
    number: int
    token_ids: list[int]  # of each chunk; -1 if the chunk is not its prompt's last, or failed
    errors: list[str]  # of each chunk; "" if it succeeded
    logprobs: list[list[TokenLogprobs]] = []  # of each chunk's token, or empty


class StageWritten(msgspec.Struct, frozen=True, tag="written"):
    """A stage's layers of a step are in the store, not committed yet (-> stage 0)."""

    epoch: str
    stage: int
    number: int
    digests: list[dict[int, dict[int, int]]]  # of each chunk: block -> layer -> digest
    errors: list[str]  # of each chunk; "" if it succeeded


class ArrivedStep(NamedTuple):
    """A received step with its attached hidden states."""

    step: StageStep
    hidden: memoryview


RequestMessage = LayersReady | Stop | Tokens | FirstToken | Heartbeat
StepMessage = StageStep | StageComputed | StageWritten
GroupMessage = GroupBegins | StageBeat | PrefixWanted | PrefixLoaded | StepMessage
WorkerMessage = RequestMessage | DrainWorker | TakeRole | GroupMessage
WorkerInbox = Inbox[WorkerMessage]
WorkerOutbox = Outbox[WorkerMessage]
decode_message = msgspec.msgpack.Decoder(WorkerMessage).decode  # raises msgspec.DecodeError
encode = msgspec.msgpack.Encoder().encode


def gap_s(streams: int, messages_per_s_max: float) -> float:
    """Seconds between two messages of each stream: `streams` / rate (> 0), at most GAP_S_MAX."""
    return min(streams / messages_per_s_max, GAP_S_MAX)


def inbox_address(name: str) -> str:
    """Address to bind for an inbox of this process: a Unix socket on a single host, any free TCP
    port of this host's address in a deployment of several hosts."""
    if host := os.environ.get(ADDRESS_VARIABLE):
        return f"tcp://{host}:0"
    folder = os.environ["MOONCAKE_SOCKETS"]
    if len(os.fsencode(f"{folder}/{name}")) > PATH_BYTES_MAX:
        name = name.rpartition("-")[2]  # the incarnation alone, which is shorter and unique
    return f"ipc://{folder}/{name}"


def inbox_prefixes() -> tuple[str, ...]:
    """Every inbox address of this launch or deployment begins with one of these prefixes."""
    if not os.environ.get(ADDRESS_VARIABLE):
        return (f"ipc://{os.environ['MOONCAKE_SOCKETS']}/",)
    peers = os.environ.get(PEERS_VARIABLE, "").split(",")
    if ANY_PEER in peers:
        return ("tcp://",)
    hosts = {os.environ[ADDRESS_VARIABLE], *peers} - {""}
    return tuple(f"tcp://{host}:" for host in sorted(hosts))


def check_version(given: object) -> None:
    """Raises WorkerGone for a call of another version, so that another worker is tried."""
    version = given if isinstance(given, int) else 0  # the first releases sent no version
    if version != CALLS_VERSION:
        raise WorkerGone(
            f"the frontend uses version {version} of the calls to workers, this worker uses "
            f"{CALLS_VERSION}; run the same release on both"
        )


def attached(message: WorkerMessage, attachment: memoryview) -> ArrivedStep:
    """Attach hidden states to a StageStep. Raises ValueError for other messages."""
    if not isinstance(message, StageStep):
        raise ValueError(f"{type(message).__name__} has no attachment")
    return ArrivedStep(message, attachment)


def open_inbox(
    address: str,
    on_messages: Callable[[list[WorkerMessage]], float | None],
    message_bytes_max: int = MESSAGE_BYTES_MAX,
) -> WorkerInbox:
    listen = address
    if (listening_host := os.environ.get(LISTEN_VARIABLE)) and address.startswith("tcp://"):
        listen = f"tcp://{listening_host}:{address.rpartition(':')[2]}"
    return Inbox(
        address,
        decode_message,
        on_messages,
        launch_secret.secret_of_launch(),
        listen=listen,
        attach=attached,  # type: ignore[arg-type]
        message_bytes_max=message_bytes_max,
    )


def open_outbox() -> WorkerOutbox:
    return Outbox(encode, launch_secret.secret_of_launch())


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits on the calls that a worker accepts. The frontend has validated the request already.
    The worker validates again, because an invalid value would fail all requests of a batch."""

    context_tokens_max: int  # largest number of prompt and output tokens
    vocabulary_tokens: int
    inboxes: tuple[str, ...] = ("",)  # allowed prefixes of inbox addresses

    def check(self, request: PrefillRequest | DecodeRequest, ids: np.ndarray) -> None:
        """Raises InvalidRequest with all problems of the request."""
        if found := list(self._problems(request, ids)):
            raise InvalidRequest("; ".join(found))

    def _problems(self, request: PrefillRequest | DecodeRequest, ids: np.ndarray) -> Iterator[str]:
        least, context = (2 if isinstance(request, DecodeRequest) else 1), self.context_tokens_max
        if not 1 <= len(request.request_id) <= REQUEST_ID_CHARACTERS_MAX:
            yield f"request_id has {len(request.request_id)} characters"
        if not least <= len(ids) <= context:
            yield f"there are {len(ids)} input_ids; this worker accepts {least} to {context}"
        elif int(ids.min()) < 0 or int(ids.max()) >= self.vocabulary_tokens:
            yield f"input_ids must be 0 to {self.vocabulary_tokens - 1}"
        if not 1 <= request.prompt_tokens <= len(ids):
            yield f"prompt_tokens is {request.prompt_tokens}; use 1 to {len(ids)}"
        yield from request.sampling.problems(
            SamplingLimits(request.prompt_tokens, context, self.vocabulary_tokens)
        )
        for field in ("fetch_blocks", "near_blocks", "stream_interval"):
            if (value := getattr(request, field, 0)) < 0:
                yield f"{field} is {value}; use 0 or more"
        inboxes = [request.reply_inbox]
        if isinstance(request, PrefillRequest):
            inboxes.append(request.decode_inbox)
            if not 0 <= request.reserve_tokens <= context:
                yield f"reserve_tokens is {request.reserve_tokens}; use 0 to {context}"
        for inbox in inboxes:
            if inbox and not inbox.startswith(self.inboxes):
                yield f"{inbox!r} is not an inbox of this deployment"
