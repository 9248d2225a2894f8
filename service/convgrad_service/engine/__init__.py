"""From decoded fields to an answer, whatever the transport: memory, order, execution, faults.

`dataplane` is the way of one request and the place to start reading. What there is once is the
`hub`'s: `memory` leases places of the `arena`, `schedule` decides what runs where and what a
worker's death means, `regions` and stored tensors live there too. Front ends in other processes
reach it through `remote`; `worker` is what computes, `process` and `supervisor` keep it alive.
Small problems on the CPU never go there: `at_once` and `on_the_spot`.
`inside` puts all of it into one process. Nothing here knows a transport.
"""
