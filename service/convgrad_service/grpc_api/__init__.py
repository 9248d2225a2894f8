"""The Open Inference Protocol v2 over gRPC: messages in and out, and the server that carries them.

Start with `exchange`: grpcio hands a call to a handler there. It is answered by `InferMethod`,
`StreamMethod`, a method of `server.DescribingMethods` or one of the `standard_services`, within the
`limits`. `open_inference.proto` defines the messages; `wire` reads the one that holds tensors,
without protobuf's copies.
"""
