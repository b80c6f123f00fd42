"""Tracing: OpenTelemetry spans of each request, and their export to a collector."""
