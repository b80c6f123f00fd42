"""Pages of the staging pool while TensorRT-LLM's processes may copy from or to them.

A page is given to a request, staged (the connector knows it) and unstaged; only when the connector
has said that no copy touches it any more does it go back. A page for which that is never said is
lost, on purpose: handing it on could put one request's KV into another's.

Not here: what is in the pages (kv_loader.py, kv_writer.py), the channel (engine/trtllm/channel.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from backends.engine.trtllm.channel import ChannelError, ConnectorHost
from backends.engine.trtllm.messages import Stage
from backends.errors import WorkerUnavailable

log = logging.getLogger(__name__)


UNSTAGE_S_MAX = 60.0  # nobody waits for it; an engine that is compiling something is not dead


class StagedPages:
    def __init__(
        self,
        host: ConnectorHost,
        timeout_s: float,
        release: Callable[[list[int]], None],
        on_failed: Callable[[str], None],
        on_dead: Callable[[str], None],
    ) -> None:
        """These are called from any thread: `on_failed` when the connector did not take a stage,
        within `timeout_s`; `on_dead` when it did not answer when pages were to be given back."""
        self._host = host
        self._timeout_s = timeout_s
        self._release = release
        self._on_failed = on_failed
        self._on_dead = on_dead
        self.lost_pages = 0
        self.is_closing = False  # the engine ends, and its memory with it: nothing is lost

    def stage(self, stage: Stage) -> None:
        """Returns when the connector knows it: only then may the prompt be submitted."""
        try:
            self._host.stage(stage, self._timeout_s).result()
        except ChannelError as error:
            self._on_failed(str(error))
            raise WorkerUnavailable(str(error)) from error

    def give_back(self, request_id: str, pages: list[int]) -> None:
        """Unstage the request, also one whose staging failed; its pages are released after that."""
        try:
            unstaged = self._host.unstage(request_id, UNSTAGE_S_MAX)
        except ChannelError as error:
            self._lose(request_id, pages, error)
            return

        def over(future: Future[None]) -> None:
            error = future.exception()
            if error is None:
                self._release(pages)
            else:
                self._lose(request_id, pages, error)

        unstaged.add_done_callback(over)

    def _lose(self, request_id: str, pages: list[int], error: BaseException) -> None:
        if self.is_closing:
            return
        self.lost_pages += len(pages)
        log.error("%d pages of %s are lost: %s", len(pages), request_id, error)
        self._on_dead(str(error))
