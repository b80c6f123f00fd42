"""Nodes and language models with their published numbers: the data for a model of a GPU.

A node is one worker: its GPUs hold the model together (tensor parallel). Sources:

- A800, H100, H200 (NVIDIA data sheets of the SXM cards): dense BF16 FLOP/s, memory, bandwidth. A
  node of eight as in the Mooncake paper (800 Gb/s, 1 TB of DRAM) and in DGX H100 and H200 (eight
  cards of 400 Gb/s, 2 TB). PCIe: 16 GB/s a GPU on the paper's nodes (128 GB/s in all), twice that
  with PCIe 5.
- Models: their config.json and the number of their parameters; bfloat16.

Not here: how long a step takes, and the share of the peak that it reaches (gpu.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuNode:
    """The numbers of one GPU and of its share of the node."""

    name: str
    gpus: int
    gpu_flop_per_s: float
    gpu_memory_bytes_per_s: float
    gpu_memory_bytes: int
    gpu_dram_bytes: int
    gpu_nic_bytes_per_s: float
    gpu_pcie_bytes_per_s: float

    @property
    def flop_per_s(self) -> float:
        return self.gpus * self.gpu_flop_per_s

    @property
    def memory_bytes_per_s(self) -> float:
        return self.gpus * self.gpu_memory_bytes_per_s

    @property
    def memory_bytes(self) -> int:
        return self.gpus * self.gpu_memory_bytes

    @property
    def dram_bytes(self) -> int:
        return self.gpus * self.gpu_dram_bytes

    @property
    def nic_bytes_per_s(self) -> float:
        return self.gpus * self.gpu_nic_bytes_per_s

    @property
    def pcie_bytes_per_s(self) -> float:
        return self.gpus * self.gpu_pcie_bytes_per_s


@dataclass(frozen=True, slots=True)
class LlmModel:
    """A dense decoder with grouped-query attention. Multi-head latent attention and experts, as in
    DeepSeek-V3, do not fit."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    parameters: float
    scalar_bytes: int = 2  # bytes of one scalar of the weights and hidden states
    kv_scalar_bytes: int = 2  # bytes of one scalar of KV; 1: fp8

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.scalar_bytes

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.kv_scalar_bytes

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Weights that each token is multiplied with: Q, O, K, V and three of the MLP."""
        attention = 2 * self.attention_width + 2 * self.kv_heads * self.head_dim
        return self.width * (attention + 3 * self.mlp_width)


TERA, GIGA = 10**12, 10**9

A800 = GpuNode("A800", 8, 312e12, 2.039e12, 80 * GIGA, TERA // 8, 12.5e9, 16e9)
H100 = GpuNode("H100", 8, 989e12, 3.35e12, 80 * GIGA, TERA // 4, 50e9, 32e9)
H200 = GpuNode("H200", 8, 989e12, 4.8e12, 141 * GIGA, TERA // 4, 50e9, 32e9)

LLAMA_3_8B = LlmModel("Llama-3-8B", 32, 4_096, 32, 8, 128, 14_336, 8.03e9)
LLAMA_3_70B = LlmModel("Llama-3-70B", 80, 8_192, 64, 8, 128, 28_672, 70.6e9)
QWEN3_32B = LlmModel("Qwen3-32B", 64, 5_120, 64, 8, 128, 25_600, 32.8e9)

HARDWARE = {node.name: node for node in (A800, H100, H200)}
MODELS = {model.name: model for model in (LLAMA_3_8B, LLAMA_3_70B, QWEN3_32B)}
