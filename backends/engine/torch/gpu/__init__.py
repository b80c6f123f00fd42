"""GPU support: recorded steps, kernels that read pages in place, copies concurrent with steps."""
