"""Events of a job's life at a worker, and the actions that follow from them.

Threads post events: the engine's thread, loaders, the writer, the inbox, and the threads of an
engine with a process of its own. Not here: which event leads to which action (prefill.py,
decode.py), carrying out actions (workers/worker.py and its two roles).
"""

from __future__ import annotations

from enum import Enum


class On(str, Enum):
    """Events. "(value)" names the value that comes with the event.

    Derived from str, which caches its hash, because each event costs a lookup in a table.
    """

    PAGES_GIVEN = "the batching has given the job its pages"
    LOADED = "a loader has read the job's KV from the store"
    GRAMMAR_READY = "a thread has compiled the job's grammar"
    LOAD_FAILED = "(error) a thread could not load the KV, compile the grammar or start the job"
    ENGINE_READY = "the driver has prepared the engine for the job"
    STOPPED = "the frontend no longer wants the job"
    FAILED = "(error) the job fails"
    BETWEEN_STEPS = "(is_reading) no step is computed. Follows ASK_TURN; asked twice, it comes once"
    ENGINE_LEFT = "(is_certain) the engine uses neither pages nor slots, and queues no more writes"
    WRITTEN = "the writer's tasks that were queued before are done. Follows each AWAIT_WRITES"
    CALL_LATE = "the call has waited long enough for copies of the job's KV to end"
    # of a prefill job
    BLOCKED = "another prompt of this worker produces the next block that the job lacks"
    UNBLOCKED = "some of the awaited blocks were stored or abandoned"
    LAYER_DUE = "a layer-wise job needs the next layer of its cached prefix"
    LAYER_READ = "(is_here) a loader has tried to read the layer; False: a block is missing"
    SAMPLED = "(token id) the first token of the output"
    ANSWERABLE = "the engine has handed KV over by itself; KV still goes to the store"
    COMPUTED = "the prompt is computed, and the last write of its KV is queued"
    # of a decode job
    KV_READ = "nobody reads the handed-over blocks in the store any more"
    DECODED = "(number of tokens decoded here) new tokens are to be sent"
    FINISHED = "(number of tokens decoded here) the last token was decoded"
    PREEMPTED = "a job of higher priority needs the pages or the slot"
    SAVED = "the writer has stored the KV of a preempted job"
    SAVE_FAILED = "(error) the writer could not store it"


class Do(Enum):
    """Actions."""

    ASK_TURN = "post BETWEEN_STEPS as soon as no step is computed"
    LOAD = "let a loader read the job's KV"
    COMPILE = "let a thread compile the grammar"
    START = "let the driver prepare the engine, which may take long"
    JOIN = "let the job take part in steps"
    REMOVE = "take the job out of the worker's tables and of the batch"
    STOP_ENGINE = "let the driver stop the job; ENGINE_LEFT follows"
    AWAIT_WRITES = "post WRITTEN after the writer's queued tasks"
    RELEASE_PAGES = "return the pages to the pool"
    PARK_PAGES = "leave the pages to the driver, because the engine may still use them"
    RELEASE_LEASES = "release the leases of the job's blocks"
    KEEP_LEASES = "stop renewing: the decode worker has the leases, or they expire"
    FAIL = "end the call with the job's error, or as cancelled"
    REPLY = "end the call with the result"
    # of a prefill job
    READ_LAYER = "let a loader read the next layer of the prefix"
    LAYER_LOADED = "tell the batching that the layer is in the ring buffers"
    STOP_BATCH = "take the job out of steps; it keeps its pages"
    GIVE_UP_SLOTS = "queue the release of the slots that were written so far"
    SEND_FIRST = "send the first token ahead of the reply"
    END_WRITES = "drop the writes of the job that are still queued"
    FREE_SLOTS = "free the slots that were never filled"
    SETTLE = "after the queued writes, let others produce the blocks that are not stored"
    # of a decode job
    RELEASE_GIVEN = "release the leases of the handed-over blocks"
    SEND = "send the new tokens"
    TAKE_PAGES = "take the pages from a preempted job, and lease its blocks"
    SAVE = "let the writer store the job's KV; SAVED or SAVE_FAILED follows"
    END_SAVE = "release the pages that a preempted job had"


# A worker carries these out without its lock, because they may wait for another process.
SLOW = {Do.START, Do.REPLY, Do.FAIL, Do.FREE_SLOTS, Do.RELEASE_LEASES, Do.RELEASE_GIVEN}
