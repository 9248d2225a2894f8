"""The engine: from decoded fields to computed tensors, independent of the transport.

Start with `pipeline`, the steps of one request. The `hub` holds what exists once: leases of the
arena (`memory`), the queue of jobs (`scheduling`), and shared memory and stored tensors (`shm`).
Front ends in other processes reach it through `ipc`; `workers` compute. `embedded` runs everything
in one process. `telemetry` counts and traces. See docs/architecture.md.
"""
