"""Which kernel runs a problem, and why: pure functions, one module per kind of device."""
