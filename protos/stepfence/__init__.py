"""The contract: generated from the protos beside it."""
