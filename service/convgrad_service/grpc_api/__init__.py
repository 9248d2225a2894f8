"""The Open Inference Protocol v2 over gRPC: messages in and out, and the server that carries them.

`server` is the place to start reading: grpcio hands a call to a handler of `exchange`, in which it
is answered by `infer` or `service`, within the `limits`. `open_inference.proto` says what is
spoken; `infer_wire` reads the message that holds tensors, without protobuf's copies.
"""
