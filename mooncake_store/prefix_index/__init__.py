"""The prefix index: prefix lengths of a prompt per holder. Pure."""
