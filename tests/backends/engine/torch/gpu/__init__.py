"""The rooms of a GPU, tested on a CPU."""
