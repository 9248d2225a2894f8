"""The Open Inference Protocol v2 over gRPC: messages in and out, and the server that carries them.

Start with `exchange`: grpcio hands a call to a handler there, in which it is answered by
`InferMethods`, by a method of `server.DescribingMethods` or by one of the `standard_services`,
within the `limits`. `open_inference.proto` defines the messages; `wire` reads the one that holds
tensors, without protobuf's copies.
"""
