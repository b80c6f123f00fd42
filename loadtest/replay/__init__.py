"""What would a published trace have met? Traces, the prompts made of them, sent at their times."""
