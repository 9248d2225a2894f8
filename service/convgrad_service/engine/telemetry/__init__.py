"""Counting and tracing of requests."""
