"""The Open Inference Protocol v2 as values: what HTTP and gRPC say alike, without either.

An operation is a model. `models` describes them, `request` holds one inference as it was asked,
`parameters` and `fields` make the operation's named fields of it, `statistics` counts in the
protocol's words. `http_head` and `http_answer` read and write the JSON form with Triton's binary
data extension; the protobuf form stands beside the gRPC server.

Nothing here opens a socket or waits.
Source: the protocol's specification (KServe) and Triton's extensions of it.
"""
