"""The CPU-only side of Stepfence: scheduler process, front end process, the `stepfence` command. Never imports torch."""
