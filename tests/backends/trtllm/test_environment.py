"""The processes of TensorRT-LLM get no leftovers of MPI, and the GPUs that they should."""

from __future__ import annotations

import pytest

from backends.engine.trtllm.environment import choose_gpus, remove_mpi_leftovers


def test_leftovers_of_mpi_go_and_what_tunes_it_stays() -> None:
    environment = {
        "OMPI_COMM_WORLD_RANK": "3", "OMPI_UNIVERSE_SIZE": "4", "PMIX_RANK": "3", "PMI_SIZE": "4",
        "ORTE_PRECONDITION": "1", "OMPI_MCA_orte_ess_num_procs": "4",
        "OMPI_MCA_btl_tcp_if_include": "eth0", "PATH": "/bin", "TLLM_LOG_LEVEL": "INFO",
    }  # fmt: skip
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
