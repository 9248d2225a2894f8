"""The Open Inference Protocol v2, as far as HTTP and gRPC have it in common.

An operation is a model. `models` describes them, `request` holds one inference request,
`parameters` and `fields` turn it into the operation's fields, `statistics` reports the counters.
`http_head` and `http_answer` read and write the JSON form with Triton's binary data extension; the
protobuf form is in `grpc_api`. Nothing here does I/O.

Sources: KServe's specification of the protocol, and Triton's extensions.
"""
