"""From decoded fields to an answer, whatever the transport: memory, order, execution, faults.

`pipeline` is the way of one request and the place to start reading. The `hub` has what exists once:
`memory` leases places of the arena, `scheduling` decides what runs where and what a worker's death
means, `shm` holds clients' shared memory and stored tensors. Front ends in other processes reach it
through `ipc`; `workers` compute. `embedded` puts all of it into one process. `telemetry` counts.
Nothing here knows a transport.
"""
