"""The Open Inference Protocol v2, as far as HTTP and gRPC have it in common.

An operation is a model. `models` describes them and reports their counters, `request` holds one
inference request, and `fields` turns it into the operation's fields. `http_json` reads and writes
the JSON form with Triton's binary data extension; the protobuf form is in `grpc_api`. Nothing here
does I/O.

Sources: KServe's specification of the protocol, and Triton's extensions.
"""
