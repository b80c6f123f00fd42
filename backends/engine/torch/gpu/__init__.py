"""GPU support: CUDA graphs, kernels that read pages in place, copies concurrent with steps."""
