"""The CPU-only side of Stepfence: scheduler process, front end process and the `stepfence` command. Never imports torch."""
