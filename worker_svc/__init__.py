"""The worker side of Stepfence: executes numbered steps and acknowledges them. Has no queue and decides nothing."""

import os

# gRPC's own lines on standard error have no bound: a client causes one with every header that cannot be read. It reads
# the variable when it is loaded; a value that is set already stays.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
