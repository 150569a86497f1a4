"""The OpenAI-compatible HTTP door of a front end (docs/openai.md, docs/decisions/0013)."""
