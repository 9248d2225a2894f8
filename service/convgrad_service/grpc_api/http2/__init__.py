"""HTTP/2 as gRPC uses it, from the server's side: no more of it, and no copy of a large body.

`frames` is what goes over the wire, `connection` takes it apart and keeps its state, `stream` is
one exchange on it. A request's bytes are received straight to where their reader wants them; what
nobody reads yet is bounded by each stream's flow-control window, and so is what a client can make
the server hold. HPACK's decoder is the hpack package's; headers are sent uncompressed.
Source: RFC 9113 (HTTP/2), RFC 7541 (HPACK).
"""
