"""KV-block accounting of one rank: pool, prefix index, fenced frees, and the manager that ties them to requests."""
