"""The parts of `make bench-serve`: servers to measure, and the clients that measure them."""
