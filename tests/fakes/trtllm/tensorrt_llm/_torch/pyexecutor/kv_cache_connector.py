"""Where versions 1.2.x have the connector API."""

from tensorrt_llm._fake.api import (
    HAS_NEW_API,
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    RequestData,
    SchedulerOutput,
)
from tensorrt_llm._fake.scheduler_output import (
    KvCacheConnectorSchedulerOutputManager,
    KvCacheConnectorSchedulerOutputRequest,
    LlmRequestState,
    mpi_rank,
)

if HAS_NEW_API:
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)

__all__ = [
    "KvCacheConnectorScheduler",
    "KvCacheConnectorSchedulerOutputManager",
    "KvCacheConnectorSchedulerOutputRequest",
    "KvCacheConnectorWorker",
    "LlmRequestState",
    "RequestData",
    "SchedulerOutput",
    "mpi_rank",
]
