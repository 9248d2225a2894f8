"""The Ray Serve application on a cluster of simulated nodes. `make ray` runs it."""
