"""How is a GPU kept busy? Recorded steps, kernels that read pages in place, copies beside steps."""
