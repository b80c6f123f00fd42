"""How long does a real worker take for prompts and batches? The command `mooncake profile`."""
