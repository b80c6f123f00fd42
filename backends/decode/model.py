"""Triton entry point of a decode worker. All of it is in backends/worker_model.py."""

from backends.worker_model import WorkerModel


class TritonPythonModel(WorkerModel):
    role = "decode"
