"""Where versions from 1.3.0rc14 on have the connector API."""

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

if not HAS_NEW_API:
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
