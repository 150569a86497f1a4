"""How this side speaks gRPC: every client channel and server is made here, so that limits, proxies and credentials have
one home."""
