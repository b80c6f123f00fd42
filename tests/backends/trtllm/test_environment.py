"""The processes of TensorRT-LLM get no leftovers of MPI, and the GPUs that they should."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from backends.engine.trtllm.package import choose_gpus, remove_mpi_leftovers, turn_to_start


def test_leftovers_of_mpi_go_and_what_tunes_it_stays() -> None:
    environment = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_UNIVERSE_SIZE": "4",
        "PMIX_RANK": "3",
        "PMI_SIZE": "4",
        "ORTE_PRECONDITION": "1",
        "OMPI_MCA_orte_ess_num_procs": "4",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        "PATH": "/bin",
        "TLLM_LOG_LEVEL": "INFO",
    }
    removed = remove_mpi_leftovers(environment)
    assert environment.keys() == {"OMPI_MCA_btl_tcp_if_include", "PATH", "TLLM_LOG_LEVEL"}
    assert len(removed) == 6


def test_gpus_are_numbered_as_this_process_sees_them() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    choose_gpus(environment, "1,2")
    assert environment["CUDA_VISIBLE_DEVICES"] == environment["TRTLLM_VISIBLE_DEVICES"] == "5,6"
    everything: dict[str, str] = {}
    choose_gpus(everything, "3")
    assert everything["CUDA_VISIBLE_DEVICES"] == "3"
    untouched = {"CUDA_VISIBLE_DEVICES": "4"}
    choose_gpus(untouched, "")
    assert untouched == {"CUDA_VISIBLE_DEVICES": "4"}


def test_a_gpu_that_this_process_does_not_see_is_refused() -> None:
    with pytest.raises(ValueError, match="sees only 4,5"):
        choose_gpus({"CUDA_VISIBLE_DEVICES": "4,5"}, "2")


def test_engines_on_one_gpu_start_one_after_the_other(tmp_path: Path) -> None:
    """Also when another has asked for more GPUs in another order."""
    order: list[str] = []
    a_holds, a_may_go = threading.Event(), threading.Event()

    def start(name: str, visible: str, holds: threading.Event, may_go: threading.Event) -> None:
        with turn_to_start(tmp_path, visible):
            order.append(f"{name} starts")
            holds.set()
            assert may_go.wait(20.0)
            order.append(f"{name} is there")

    open_gate = threading.Event()
    open_gate.set()
    first = threading.Thread(target=start, args=["a", "1,0", a_holds, a_may_go])
    first.start()
    assert a_holds.wait(20.0)
    other = threading.Event()
    start("c", "2", other, open_gate)  # another GPU waits for nobody
    second = threading.Thread(target=start, args=["b", "0,1", threading.Event(), open_gate])
    second.start()
    a_may_go.set()
    first.join(20.0)
    second.join(20.0)
    assert order == ["a starts", "c starts", "c is there", "a is there", "b starts", "b is there"]
