"""The convgrad server: problems, plans, backends, and the transports in front of them."""
