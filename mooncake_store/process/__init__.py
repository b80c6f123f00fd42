"""Parts that all processes share: logs, metrics pages, self-checks, child processes, file edits."""
