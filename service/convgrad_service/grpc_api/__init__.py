"""The Open Inference Protocol v2 over gRPC: messages in and out, and the server that carries them.

`server` is the place to start reading: a call comes from `http2`, is read by `call`, and is
answered by `infer` or `service` under the eyes of `exchange`. `open_inference.proto` says what is
spoken; `infer_wire` and `asked` read the message that holds tensors, without protobuf's copies.
"""
