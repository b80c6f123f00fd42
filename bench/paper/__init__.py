"""The papers' experiments and figures, simulated, beside the numbers that the papers report."""
