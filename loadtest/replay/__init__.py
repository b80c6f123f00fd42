"""Replaying a published trace: traces, the prompts made of them, and sending at their times."""
