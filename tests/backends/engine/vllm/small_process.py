"""Plays the process of vLLM for tests of the worker's end: no vLLM, and answers at once.

Its arguments choose what it does. `{"ends": 3}` ends with this code, `{"fails": "why"}` cannot
start.
A prompt's first token id is the number of tokens of its answer, the second one how it ends.
"""

from __future__ import annotations

import sys
import threading

import msgspec

from backends.engine.vllm import messages as m
from backends.token_logprobs import TokenLogprobs
from mooncake_store.block_keys import unpacked_tokens
from mooncake_store.wire.mailbox import Inbox, Outbox

DESCRIBED = m.DescribedKv(
    "0.32.0", "SmallForCausalLM", 2, 64, 2, 32, False, "float32", 32, 2048, 1024, "cpu", "id", False
)
LOGPROBS = TokenLogprobs(-0.5, (7, 3), (-0.5, -1.5))
ENDS_WELL, REFUSED, DIES, STAYS = range(4)  # second token of a prompt


def main() -> None:
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=m.Setup)
    if code := setup.arguments.get("ends"):
        sys.exit(int(code))
    outbox: Outbox[m.FromProcess] = Outbox(msgspec.msgpack.Encoder().encode)
    is_over = threading.Event()

    def send(message: m.FromProcess) -> None:
        outbox.send(setup.address, message)

    def take(messages: list[m.FromWorker]) -> None:
        for message in messages:
            match message:
                case m.Begin():
                    send(m.Started())
                case m.Generate():
                    answer(message)
                case m.Abort():
                    send(m.Outputs([m.Output(message.number, [], "abort")]))

    def answer(asked: m.Generate) -> None:
        count, how = unpacked_tokens(asked.token_ids).tolist()[:2]
        number = asked.number
        if how == DIES:
            send(m.VllmFailed("the EngineCore has died"))
        elif how == REFUSED:
            send(m.Outputs([m.Output(number, [], "error", "vllm: too long", is_refused=True)]))
        else:
            logprobs = [LOGPROBS] * count if "logprobs" in asked.sampling else []
            news = [m.Output(number, [7] * count, logprobs=logprobs)]
            send(m.Outputs(news if how == STAYS else [*news, m.Output(number, [], "length")]))

    inbox: Inbox[m.FromWorker] = Inbox(
        setup.address + m.OWN, msgspec.msgpack.Decoder(m.FromWorker).decode, take
    )
    send(m.VllmFailed(setup.arguments["fails"]) if "fails" in setup.arguments else DESCRIBED)
    sys.stdin.buffer.read()
    is_over.set()
    inbox.close()
    outbox.close()


if __name__ == "__main__":
    main()
