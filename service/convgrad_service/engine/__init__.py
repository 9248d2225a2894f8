"""From decoded fields to an answer, whatever the transport: admission, limits, execution.

`dataplane` is the way of one request and the place to start reading; `queue` decides what runs
when, `memory` what fits, `limits` what is too large ever to run. Nothing here knows a transport.
"""
