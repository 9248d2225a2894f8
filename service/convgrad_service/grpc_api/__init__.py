"""The Open Inference Protocol v2 over gRPC: messages in and out, and the server that carries them.

`server` is the place to start reading: grpcio hands a call to a handler of `exchange`, in which it
is answered by `infer` or `service`, within the `limits`. `open_inference.proto` says what is
spoken; `infer_wire` reads the message that holds tensors, without protobuf's copies.
"""

import os

# grpcio reads this as it is first imported. Its event engine hands each event from thread to thread
# once more than the poller before it: a call of 1 KiB takes a seventh longer (tests/perf/results).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
