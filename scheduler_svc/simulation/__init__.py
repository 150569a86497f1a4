"""The real scheduler on simulated workers: scenarios, replays, workloads."""
