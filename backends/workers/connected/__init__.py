"""Workers on engines with a process and pages of their own."""
