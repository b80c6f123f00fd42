"""What frontends and workers say to each other.

Two channels. *Calls* are requests to the models `prefill_*` and `decode_*` over gRPC
(grpc_calls.py): token ids travel as a tensor, the rest as one MessagePack string. `CallLimits` says
which of them a worker takes.

*Messages* go to the inbox of one very process, rather than to "whoever serves that model now" (a
model name may be served by two processes while a config.pbtxt reloads): stop a request, hand-over
progress from prefill to decode, the tokens of all streams that a frontend has at a decode worker,
one message per step (token_streams.py), which of its requests a worker has in hand, and the steps
of a pipeline group, from stage to stage, with their hidden states. Losing one is harmless: progress
of a hand-over only saves time, a stop is sent again while the request lives, lost tokens are
noticed, and a group that misses a step begins anew. What comes from outside this launch is dropped:
it does not know its secret (launch_secret.py).

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

# Of the calls, beside the request; a release that changes what they mean counts it up.
VERSION_PARAMETER, CALLS_VERSION = "protocol_version", 2

REQUEST_ID_CHARACTERS_MAX = 256
ADDRESS_VARIABLE = "MOONCAKE_ADDRESS"  # where other hosts reach this one; unset: one host only
LISTEN_VARIABLE = "MOONCAKE_LISTEN"  # which of its addresses it binds, when that is another one
PEERS_VARIABLE = "MOONCAKE_PEERS"  # addresses of all hosts of the deployment, comma separated ...
ANY_PEER = "*"  # ... or this: hosts that no file names may join
HEARTBEAT_S = 5.0  # between the signs of life of a request that waits or is computed
GAP_S_MAX = 0.1  # between the messages of a stream, however many streams there are


class BlockRef(msgspec.Struct, frozen=True, array_like=True):
    """Where block `index` of a request's KV lies in the store."""

    index: int
    node_id: str
    slot: int
    generation: int
    checksum: int


class PrefillRequest(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute the KV of input_ids and sample one token.

    `prompt_tokens` of input_ids are the client's; what follows are tokens that it already got
    (a request that continues after a decode worker died).
    """

    request_id: str
    prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str
    fetch_blocks: int  # how many leading blocks may be copied from other nodes
    decode_inbox: str  # where layers may be announced while they are computed; "" for nowhere
    reply_inbox: str  # of the frontend: a FirstToken may go there ahead of the reply; "": not
    reserve_tokens: int  # KV that the decode worker should make room for
    # Its position in the queue: so many seconds behind its own arrival (conductor/queue_order.py).
    place_s: float = 0.0
    is_resumed: bool = False  # it goes on after a loss: a full queue does not refuse it
    # Which nodes those blocks are to be copied from: the conductor's choice, then its second one.
    # Others are asked only for what these do not have.
    fetch_nodes: list[str] = []
    trace_id: str = ""  # for the worker's log
    near_blocks: int = 0  # leading ones in the memory of its node, when the conductor decided


class PrefillReply(msgspec.Struct, frozen=True, tag="prefilled"):
    incarnation: str
    cached_tokens: int
    fetched_blocks: int
    fetched_bytes: int
    blocks: list[BlockRef]  # all of the request's KV; the last may be partial
    queue_s: float
    load_s: float
    compute_s: float
    put_s: float
    queue_ahead: int = 0  # prompts in front of it when it came
    native: bytes = b""  # where the engine itself hands KV over: what its other half needs
    fetched_from: dict[str, int] = {}  # bytes that came from each node for this request
    load_at_s: float = -1.0  # loading began so long after the prompt came; -1: it does not say
    compute_at_s: float = -1.0  # and its first chunk
    logprobs: list[TokenLogprobs] = []  # of the token, where the request wants them


class DecodeRequest(msgspec.Struct, frozen=True, tag="decode"):
    """Go on from input_ids, whose KV is in `blocks` except for the last token's."""

    request_id: str
    prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str
    blocks: list[BlockRef]
    stream_interval: int  # tokens per message; 0: all with the reply
    reply_inbox: str  # of the frontend: where messages before the reply go
    tbt_slo_s: float = 0.0  # refuse it when a step with it would take longer; 0: no limit
    native: bytes = b""  # PrefillReply's
    is_resumed: bool = False  # it goes on after a loss: a full queue does not refuse it
    # Of the last token of input_ids, where the request wants them: text that may become a stop word
    # is held back together with its tokens, so this worker may be the one that releases it.
    first_logprobs: list[TokenLogprobs] = []
    trace_id: str = ""  # for the worker's log
    priority: int = 0  # a higher one waits less, and preempts lower ones where pages are short
    # That the frontend sends to all of its clients, so that tokens that would wait there wait here,
    # and cost one message instead of several; 0: none waits.
    messages_per_s_max: float = 0.0


class DecodeReply(msgspec.Struct, frozen=True, tag="decoded", omit_defaults=True):
    """The end of a request and its last tokens, which travel beside it as a tensor."""

    incarnation: str  # of the process that was at work
    tokens_before: int  # decoded ones that messages have brought, or will
    text: str
    context_ids: list[int]
    cut_bytes: int
    finish_reason: str
    queue_s: float = 0.0
    load_s: float = 0.0
    loaded_early_blocks: int = 0  # handed over layer by layer before the request came
    read_bytes: dict[str, int] = {}
    logprobs: list[TokenLogprobs] = []  # of each of those last tokens, or of none


class WorkerFailure(msgspec.Struct, frozen=True, tag="failed"):
    """Instead of a reply: the request failed; `message` as errors.wire_message writes it.

    Not a Triton error: those lose their class on the way, and by BLS an error that follows other
    responses never arrives (2.51).
    """

    message: str


class LayersReady(msgspec.Struct, frozen=True, tag="layers"):
    """Layer `layer` of these blocks is in the store (prefill -> decode inbox).

    `checksums[i]` is that of the layer in blocks[i]. `layer` -1: whole blocks, with the checksum
    in the BlockRef itself.
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
    """Take no new requests, or, with `is_on` false, take them again (operator -> worker).

    `moves`: those that are there fail with WorkerGone, so that they go on elsewhere.
    """

    is_on: bool
    moves: bool = False


class TakeRole(msgspec.Struct, frozen=True, tag="take_role"):
    """Finish what you have, then register as a worker of this role (frontend -> worker).

    Only to the incarnation that is named: whoever has changed its role meanwhile is another one.
    """

    role: str  # "prefill" | "decode"
    incarnation: str


class TokenUpdate(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request, in the order of decoding."""

    request_id: str
    tokens_before: int  # decoded ones of this request: shows a lost message
    token_ids: list[int]
    text: str
    context_ids: list[int]
    cut_bytes: int
    logprobs: list[TokenLogprobs] = []  # of each token, or of none


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """What a step brought for the streams of one frontend (decode worker -> frontend)."""

    incarnation: str
    updates: list[TokenUpdate]


class FirstToken(msgspec.Struct, frozen=True, tag="first"):
    """A prompt is computed (prefill worker -> frontend), while its KV is still being put.

    Only when the token does not end the answer, whatever its text.
    """

    request_id: str
    token_id: int
    cached_tokens: int
    logprobs: list[TokenLogprobs] = []


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """These requests of one frontend are in hand, queued or at work (worker -> frontend)."""

    incarnation: str
    request_ids: list[str]


class GroupBegins(msgspec.Struct, frozen=True, tag="group"):
    """A pipeline group is whole (stage 0 -> each other stage): from now on work of this epoch only.

    The stage is to finish or drop what it has of earlier epochs, and then says StageBeat.
    """

    epoch: str
    first_inbox: str
    next_inbox: str  # of the next stage; "" for the last
    chunk_tokens: int  # longest step


class StageBeat(msgspec.Struct, frozen=True, tag="beat"):
    """A stage is there (stage -> stage 0): in this epoch; "": in none, it has lost its place."""

    epoch: str
    stage: int
    incarnation: str


class PrefixWanted(msgspec.Struct, frozen=True, tag="prefix_wanted"):
    """Read your layers of these blocks into these pages (stage 0 -> each other stage)."""

    epoch: str
    number: int
    copies: list[Copy]
    pages: list[int]


class PrefixLoaded(msgspec.Struct, frozen=True, tag="prefix_loaded"):
    """So many leading blocks are in the pages, and nothing more will be written there."""

    epoch: str
    stage: int
    number: int
    blocks: int


class LastTokens(msgspec.Struct, frozen=True, array_like=True):
    """What the last stage needs to sample: of a prompt that a step completes."""

    sampling: SamplingParams
    prompt_ids: bytes  # int32
    output_ids: bytes


class StageWork(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of a step, and where the KV of the blocks that it completes goes."""

    request_id: str
    start: int
    tokens: int
    pages: list[int]
    kv_tokens: int
    reserve_tokens: int
    decode_inbox: str
    slots: list[tuple[int, Slot]]  # of each completed block that the store lacks
    last: LastTokens | None = None


class StageStep(msgspec.Struct, frozen=True, tag="step"):
    """A step of a pipeline group (stage -> next stage); hidden states are attached to it."""

    epoch: str
    number: int  # consecutive within an epoch
    works: list[StageWork]
    error: str = ""  # a stage failed with it: nothing is attached, and nothing is to be computed


class StageComputed(msgspec.Struct, frozen=True, tag="computed"):
    """The last stage has computed a step (-> stage 0)."""

    epoch: str
    number: int
    token_ids: list[int]  # of each work; -1 where none was due
    errors: list[str]  # of each work; of all of them when the step failed
    logprobs: list[list[TokenLogprobs]] = []  # of each work: of its token, or none


class StageWritten(msgspec.Struct, frozen=True, tag="written"):
    """What a stage computed of a step is in the store, not committed yet (-> stage 0)."""

    epoch: str
    stage: int
    number: int
    digests: list[dict[int, dict[int, int]]]  # of each work: of the layers of its blocks
    errors: list[str]  # of each work


@dataclass(frozen=True, slots=True)
class ArrivedStep:
    """A step with its hidden states, as they came."""

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
_decode_message = msgspec.msgpack.Decoder(WorkerMessage)
_encode = msgspec.msgpack.Encoder().encode


def gap_s(streams: int, messages_per_s_max: float) -> float:
    """Between two messages of a stream, when a frontend has so many."""
    return min(streams / messages_per_s_max, GAP_S_MAX)


def encode(message: msgspec.Struct) -> bytes:
    return _encode(message)


def decode_message(data: bytes) -> WorkerMessage:
    """Raises msgspec.DecodeError on anything else."""
    return _decode_message.decode(data)


def inbox_address(name: str) -> str:
    """Where an inbox of this process listens: a socket of this launch, or, where the deployment has
    other hosts, any free port of this host's address."""
    if host := os.environ.get(ADDRESS_VARIABLE):
        return f"tcp://{host}:0"
    folder = os.environ["MOONCAKE_SOCKETS"]
    if len(os.fsencode(f"{folder}/{name}")) > PATH_BYTES_MAX:
        name = name.rpartition("-")[2]  # the incarnation, which no other process has
    return f"ipc://{folder}/{name}"


def inboxes_known() -> tuple[str, ...]:
    """What the addresses of this launch's or deployment's inboxes begin with."""
    if not os.environ.get(ADDRESS_VARIABLE):
        return (f"ipc://{os.environ['MOONCAKE_SOCKETS']}/",)
    peers = os.environ.get(PEERS_VARIABLE, "").split(",")
    if ANY_PEER in peers:
        return ("tcp://",)
    hosts = {os.environ[ADDRESS_VARIABLE], *peers} - {""}
    return tuple(f"tcp://{host}:" for host in sorted(hosts))


def check_version(given: object) -> None:
    """WorkerGone for a call of another version: the frontend goes on at a worker of its own."""
    version = given if isinstance(given, int) else 0  # before there were versions
    if version != CALLS_VERSION:
        raise WorkerGone(
            f"the frontend speaks version {version} of the calls to workers, this worker "
            f"{CALLS_VERSION}; run the same release on both"
        )


def attached(message: WorkerMessage, attachment: memoryview) -> ArrivedStep:
    """The one message that has large bytes beside it."""
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
    """What a worker can serve, and every reason why it cannot serve a call.

    The frontend has checked what clients send; a worker looks again before a call joins a batch,
    because one value that its engine cannot take would fail all requests of the batch.
    """

    context_tokens_max: int
    vocabulary_tokens: int
    inboxes: tuple[str, ...] = ("",)  # what addresses of inboxes of ours begin with

    def check(self, request: PrefillRequest | DecodeRequest, ids: np.ndarray) -> None:
        """Raises InvalidRequest with every reason."""
        if found := list(_problems(request, ids, self)):
            raise InvalidRequest("; ".join(found))


def _problems(
    request: PrefillRequest | DecodeRequest, ids: np.ndarray, limits: CallLimits
) -> Iterator[str]:
    least, context = (2 if isinstance(request, DecodeRequest) else 1), limits.context_tokens_max
    if not 1 <= len(request.request_id) <= REQUEST_ID_CHARACTERS_MAX:
        yield f"request_id has {len(request.request_id)} characters"
    if not least <= len(ids) <= context:
        yield f"{len(ids)} input_ids came; this worker takes {least} to {context}"
    elif int(ids.min()) < 0 or int(ids.max()) >= limits.vocabulary_tokens:
        yield f"input_ids must be 0 to {limits.vocabulary_tokens - 1}"
    if not 1 <= request.prompt_tokens <= len(ids):
        yield f"prompt_tokens is {request.prompt_tokens} of {len(ids)} input_ids"
    yield from request.sampling.problems(
        SamplingLimits(request.prompt_tokens, context, limits.vocabulary_tokens)
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
        if inbox and not inbox.startswith(limits.inboxes):
            yield f"{inbox!r} is no inbox of this deployment"
