"""A step's index arrays go over in one copy, whatever their number and size."""

from __future__ import annotations

import random

import numpy as np
import torch

from backends.engine.torch.gpu import staging
from backends.engine.torch.gpu.staging import Staging

CPU = torch.device("cpu")


def test_arrays_are_on_the_device_after_one_send(seed: int) -> None:
    chance = random.Random(seed)
    for slab in (64, 1_000, staging.SLAB_INTEGERS):
        staged = Staging(CPU, is_direct=False)
        staging_slab, staging.SLAB_INTEGERS = staging.SLAB_INTEGERS, slab
        try:
            shapes = [(chance.randrange(1, 40), chance.randrange(1, 9)) for _ in range(30)]
            arrays = [np.random.default_rng(seed).integers(-9, 2**40, shape) for shape in shapes]
            there = [staged.put(array) for array in arrays]
            staged.send()
        finally:
            staging.SLAB_INTEGERS = staging_slab
        for array, tensor in zip(arrays, there, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)


def test_on_a_cpu_an_array_is_its_own_tensor() -> None:
    array = np.arange(12, dtype=np.int64).reshape(3, 4)
    tensor = Staging(CPU).put(array)
    array[1, 2] = 77
    assert tensor[1, 2] == 77
