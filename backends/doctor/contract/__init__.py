"""What this project uses of TensorRT-LLM, and whether an installed package or a folder has it."""
