"""Pipeline parallelism: several workers, each with a share of the layers, compute prompts."""
