"""The worker side of Stepfence: executes numbered steps and acknowledges them. Has no queue and decides nothing."""
