"""Protocol between frontends and workers.

*Calls* are requests to the models `prefill_*` and `decode_*` over gRPC (grpc_calls.py). Token ids
are a tensor, all other fields one MessagePack string. `CallLimits` validates them in the worker.

*Messages* go to the inbox of one process. Two processes may serve the same model name while a
config.pbtxt reloads, so a name would not identify the receiver. There are messages to stop a
request, to announce handed-over layers, to stream tokens (one message per frontend and step, see
token_streams.py), for heartbeats of requests, and for the steps of a pipeline group with their
hidden states. A lost message is harmless: an announcement only saves time, a stop is sent again, a
gap in the tokens is detected, and a pipeline group starts a new epoch. An inbox drops messages
without the secret of its launch (launch_secret.py).

Not here: the store's protocol (mooncake_store/wire/directory_protocol.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from backends import launch_secret
from backends.engine.sampling_params import SamplingLimits, SamplingParams
from backends.errors import InvalidRequest, WorkerGone
from backends.token_logprobs import TokenLogprobs
from mooncake_store.records.blocks import Copy, Slot
from mooncake_store.wire.mailbox import MESSAGE_BYTES_MAX, Inbox, Outbox
from mooncake_store.wire.unix_socket import PATH_BYTES_MAX

# Tensors of the worker models.
REQUEST_IDS, REQUEST_BODY, REQUEST_STOP = "input_ids", "request", "stop"
REPLY_IDS, REPLY_BODY = "output_ids", "reply"

# A parameter of each call. A release that changes the meaning of calls increments the version.
VERSION_PARAMETER, CALLS_VERSION = "protocol_version", 2

REQUEST_ID_CHARACTERS_MAX = 256
ADDRESS_VARIABLE = "MOONCAKE_ADDRESS"  # this host's address for other hosts; unset: one host only
LISTEN_VARIABLE = "MOONCAKE_LISTEN"  # the address to bind, if it differs
PEERS_VARIABLE = "MOONCAKE_PEERS"  # addresses of the deployment's hosts, comma separated
ANY_PEER = "*"  # an entry of MOONCAKE_PEERS: any host may join
HEARTBEAT_S = 5.0  # interval between heartbeats of a waiting or running request
GAP_S_MAX = 0.1  # largest gap between messages of a stream, for any number of streams


class BlockRef(msgspec.Struct, frozen=True, array_like=True):
    """Location of block `index` of a request's KV in the store."""

    index: int
    node_id: str
    slot: int
    generation: int
    checksum: int


class PrefillRequest(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute the KV of input_ids and sample one token.

    The first `prompt_tokens` of input_ids are the prompt. Further ones are output tokens that the
    client already has, if the request resumes after a decode worker's failure.
    """

    request_id: str
    prompt_tokens: int  # 1 <= prompt_tokens <= len(input_ids)
    sampling: SamplingParams
    cache_salt: str
    fetch_blocks: int  # blocks that may be fetched from other nodes
    decode_inbox: str  # inbox of the decode worker for announced layers; "": announce none
    reply_inbox: str  # inbox of the frontend for a FirstToken before the reply; "": send none
    reserve_tokens: int  # KV tokens for which the decode worker reserves pages
    # Queue order key minus arrival time, in s (conductor/queue_order.py).
    place_s: float = 0.0
    is_resumed: bool = False  # it resumes after a failure: a full queue does not reject it
    # Source nodes of the fetch: the conductor's choice, then its second choice. Other nodes are
    # asked only for blocks that these lack or do not send.
    fetch_nodes: list[str] = []
    trace_id: str = ""  # for the worker's log
    near_blocks: int = 0  # leading blocks in the local node's memory at the conductor's decision


class PrefillReply(msgspec.Struct, frozen=True, tag="prefilled"):
    incarnation: str
    cached_tokens: int
    fetched_blocks: int
    fetched_bytes: int
    blocks: list[BlockRef]  # all KV of the request; the last block may be partial
    queue_s: float
    load_s: float
    compute_s: float
    put_s: float  # from the end of computation to the commit of the last block
    queue_ahead: int = 0  # prompts before it in the queue order at its arrival
    native: bytes = b""  # the engine's own hand-over data for the decode engine
    fetched_from: dict[str, int] = {}  # node -> bytes fetched for this request
    load_at_s: float = -1.0  # from the arrival to the start of loading; -1: unknown
    compute_at_s: float = -1.0  # from the arrival to the start of the first chunk; -1: unknown
    logprobs: list[TokenLogprobs] = []  # of the token, if requested


class DecodeRequest(msgspec.Struct, frozen=True, tag="decode"):
    """Continue after input_ids. The KV of all but the last is in `blocks`, or moved by `native`."""

    request_id: str
    prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str
    blocks: list[BlockRef]
    stream_interval: int  # tokens per message; 0: all tokens in the reply
    reply_inbox: str  # inbox of the frontend for messages before the reply
    tbt_slo_s: float = 0.0  # reject the request if a step with it would take longer; 0: no limit
    native: bytes = b""  # PrefillReply.native
    is_resumed: bool = False  # it resumes after a failure: a full queue does not reject it
    # Logprobs of the last token of input_ids, if requested. Text that may become a stop word is
    # held back together with its tokens, so this worker may have to send them.
    first_logprobs: list[TokenLogprobs] = []
    trace_id: str = ""  # for the worker's log
    priority: int = 0  # a higher priority waits less, and preempts lower ones if pages are short
    # The frontend's limit on messages to all its clients. Tokens that it would delay are delayed
    # here, where several cost one message. 0: no limit.
    messages_per_s_max: float = 0.0


class DecodeReply(msgspec.Struct, frozen=True, tag="decoded", omit_defaults=True):
    """The end of a request. Its remaining tokens are sent with it, as a tensor."""

    incarnation: str  # of the worker process
    tokens_before: int  # decoded tokens in messages before this reply
    text: str
    context_ids: list[int]
    cut_bytes: int
    finish_reason: str
    queue_s: float = 0.0
    load_s: float = 0.0
    loaded_early_blocks: int = 0  # blocks read layer by layer before the request arrived
    read_bytes: dict[str, int] = {}  # transport -> bytes read for the request
    logprobs: list[TokenLogprobs] = []  # of each remaining token, or empty


class WorkerFailure(msgspec.Struct, frozen=True, tag="failed"):
    """Sent instead of a reply if the request failed; `message` is from errors.wire_message.

    A Triton error would lose its class, and with BLS an error after other responses is lost (2.51).
    """

    message: str


class LayersReady(msgspec.Struct, frozen=True, tag="layers"):
    """Layer `layer` of these blocks is in the store (prefill -> decode inbox).

    `checksums[i]` is the checksum of the layer in blocks[i]. `layer` -1 announces whole blocks, and
    the checksums are in the BlockRefs.
    """

    request_id: str
    kv_tokens: int
    reserve_tokens: int
    layer: int
    blocks: list[BlockRef]
    checksums: list[int]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    request_id: str
    reason: str


class DrainWorker(msgspec.Struct, frozen=True, tag="drain"):
    """Reject new requests, or with `is_on` false accept them again (operator -> worker).

    `moves`: the worker's requests fail with WorkerGone, so that they resume on other workers.
    """

    is_on: bool
    moves: bool = False


class TakeRole(msgspec.Struct, frozen=True, tag="take_role"):
    """Finish all requests, then register as a worker of this role (frontend -> worker).

    Only for the named incarnation: a worker that has changed its role has a new one.
    """

    role: str  # "prefill" | "decode"
    incarnation: str


class TokenUpdate(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request, in the order of decoding."""

    request_id: str
    tokens_before: int  # tokens in earlier messages of this request; a gap shows a lost message
    token_ids: list[int]
    text: str
    context_ids: list[int]
    cut_bytes: int
    logprobs: list[TokenLogprobs] = []  # of each token, or empty


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """New tokens of all streams of one frontend (decode worker -> frontend)."""

    incarnation: str
    updates: list[TokenUpdate]


class FirstToken(msgspec.Struct, frozen=True, tag="first"):
    """The first token of a computed prompt, before its KV is stored (prefill worker -> frontend).

    Sent only if the token cannot end the output.
    """

    request_id: str
    token_id: int
    cached_tokens: int
    logprobs: list[TokenLogprobs] = []


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """These requests of one frontend are queued or running (worker -> frontend)."""

    incarnation: str
    request_ids: list[str]


class GroupBegins(msgspec.Struct, frozen=True, tag="group"):
    """An epoch of a pipeline group begins (stage 0 -> each other pipeline stage).

    The stage finishes or drops all work of earlier epochs, and then sends StageBeat.
    """

    epoch: str
    first_inbox: str  # inbox of stage 0
    next_inbox: str  # inbox of the next stage; "" for the last stage
    chunk_tokens: int  # tokens of the longest step


class StageBeat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat of a pipeline stage with its epoch; "": none, it missed a step (-> stage 0)."""

    epoch: str
    stage: int
    incarnation: str


class PrefixWanted(msgspec.Struct, frozen=True, tag="prefix_wanted"):
    """Request to read a stage's layers of these blocks into these pages (stage 0 -> each other)."""

    epoch: str
    number: int
    copies: list[Copy]
    pages: list[int]


class PrefixLoaded(msgspec.Struct, frozen=True, tag="prefix_loaded"):
    """`blocks` leading blocks are in the pages; no later write will follow (-> stage 0)."""

    epoch: str
    stage: int
    number: int
    blocks: int


class SampleInputs(msgspec.Struct, frozen=True, array_like=True):
    """Inputs for sampling in the last stage, for a prompt that a step completes."""

    sampling: SamplingParams
    prompt_ids: bytes  # int32
    output_ids: bytes  # int32


class StageWork(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of a step, and the slots for the KV of the blocks that it completes."""

    request_id: str
    start: int
    tokens: int
    pages: list[int]
    kv_tokens: int
    reserve_tokens: int
    decode_inbox: str
    slots: list[tuple[int, Slot]]  # (block, slot) of each completed block that the store lacks
    last: SampleInputs | None = None


class StageStep(msgspec.Struct, frozen=True, tag="step"):
    """A step of a pipeline group (stage -> next stage); hidden states are attached to it."""

    epoch: str
    number: int  # consecutive within an epoch
    works: list[StageWork]
    error: str = ""  # error of an earlier stage: nothing is attached, nothing is computed


class StageComputed(msgspec.Struct, frozen=True, tag="computed"):
    """The last stage has computed a step (-> stage 0)."""

    epoch: str
    number: int
    token_ids: list[int]  # of each chunk; -1 unless the chunk is its prompt's last
    errors: list[str]  # of each chunk; "" if it succeeded
    logprobs: list[list[TokenLogprobs]] = []  # of each chunk's token, or empty


class StageWritten(msgspec.Struct, frozen=True, tag="written"):
    """A stage's layers of a step are in the store, not committed yet (-> stage 0)."""

    epoch: str
    stage: int
    number: int
    digests: list[dict[int, dict[int, int]]]  # of each chunk: block -> layer -> digest
    errors: list[str]  # of each chunk; "" if it succeeded


@dataclass(frozen=True, slots=True)
class ArrivedStep:
    """A received step with its attached hidden states."""

    step: StageStep
    hidden: memoryview


WorkerMessage = (
    LayersReady
    | Stop
    | DrainWorker
    | TakeRole
    | Tokens
    | FirstToken
    | Heartbeat
    | GroupBegins
    | StageBeat
    | PrefixWanted
    | PrefixLoaded
    | StageStep
    | StageComputed
    | StageWritten
)
WorkerInbox = Inbox[WorkerMessage]
WorkerOutbox = Outbox[WorkerMessage]
decode_message = msgspec.msgpack.Decoder(WorkerMessage).decode  # raises msgspec.DecodeError
encode = msgspec.msgpack.Encoder().encode


def gap_s(streams: int, messages_per_s_max: float) -> float:
    """Gap between two messages of a stream, if the frontend has that many. The rate is above 0."""
    return min(streams / messages_per_s_max, GAP_S_MAX)


def inbox_address(name: str) -> str:
    """Address for an inbox of this process: a socket of this launch, or with several hosts any free
    port of this host's address."""
    if host := os.environ.get(ADDRESS_VARIABLE):
        return f"tcp://{host}:0"
    folder = os.environ["MOONCAKE_SOCKETS"]
    if len(os.fsencode(f"{folder}/{name}")) > PATH_BYTES_MAX:
        name = name.rpartition("-")[2]  # the incarnation, which no other process has
    return f"ipc://{folder}/{name}"


def inbox_prefixes() -> tuple[str, ...]:
    """Prefixes of the inbox addresses of this launch or deployment."""
    if not os.environ.get(ADDRESS_VARIABLE):
        return (f"ipc://{os.environ['MOONCAKE_SOCKETS']}/",)
    peers = os.environ.get(PEERS_VARIABLE, "").split(",")
    if ANY_PEER in peers:
        return ("tcp://",)
    hosts = {os.environ[ADDRESS_VARIABLE], *peers} - {""}
    return tuple(f"tcp://{host}:" for host in sorted(hosts))


def check_version(given: object) -> None:
    """Raises WorkerGone for a call of another version: the frontend retries on another worker."""
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
    secret = launch_secret.secret_of_launch()
    return Inbox(
        address,
        decode_message,
        on_messages,
        secret,
        listen=listen,
        attach=attached,  # type: ignore[arg-type]
        message_bytes_max=message_bytes_max,
    )


def open_outbox() -> WorkerOutbox:
    return Outbox(encode, launch_secret.secret_of_launch())


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of a worker on calls.

    The frontend validates clients' requests. A worker validates again before a call joins a batch,
    because a value that the engine cannot handle would fail all requests of the batch.
    """

    context_tokens_max: int  # largest number of prompt and output tokens
    vocabulary_tokens: int
    inboxes: tuple[str, ...] = ("",)  # allowed prefixes of inbox addresses

    def check(self, request: PrefillRequest | DecodeRequest, ids: np.ndarray) -> None:
        """Raises InvalidRequest with every reason."""
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
            yield f"prompt_tokens is {request.prompt_tokens} of {len(ids)} input_ids"
        yield from request.sampling.problems(
            SamplingLimits(request.prompt_tokens, context, self.vocabulary_tokens)
        )
        inboxes = [request.reply_inbox]
        if isinstance(request, PrefillRequest):
            inboxes.append(request.decode_inbox)
            if request.fetch_blocks < 0:
                yield f"fetch_blocks is {request.fetch_blocks}"
            if request.near_blocks < 0:
                yield f"near_blocks is {request.near_blocks}"
            if not 0 <= request.reserve_tokens <= context:
                yield f"reserve_tokens is {request.reserve_tokens}; use 0 to {context}"
        elif request.stream_interval < 0:
            yield f"stream_interval is {request.stream_interval}"
        for inbox in inboxes:
            if inbox and not inbox.startswith(self.inboxes):
                yield f"{inbox!r} is not an inbox of this deployment"
