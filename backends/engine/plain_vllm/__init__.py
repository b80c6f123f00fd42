"""How plain vLLM servers share prefixes through the store, without Triton and without a worker."""
