"""The CPU-only side of Stepfence: scheduler process, front end process, `stepfence` command. Never imports torch."""
