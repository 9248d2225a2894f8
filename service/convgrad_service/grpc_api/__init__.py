"""The Open Inference Protocol v2 over gRPC: messages in and out, and the server that carries them.

`server` is the place to start reading. `open_inference.proto` says what is spoken; `infer_wire`
reads and writes the two messages that hold tensors, without protobuf's copies.
"""
