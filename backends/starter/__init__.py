"""`mooncake init`: a first model repository, or one from a model.yaml of `llmapi`."""
