"""The CPU-only side of Stepfence: scheduler process, front end process, `stepfence` command. Never imports torch."""

import os

# gRPC's own lines on standard error have no bound: a client causes one with every header that cannot be read. It reads
# the variable when it is loaded; a value that is set already stays.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
