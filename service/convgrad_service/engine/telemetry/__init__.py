"""Measuring, counting, logging and tracing of requests."""
