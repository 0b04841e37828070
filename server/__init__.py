"""The OpenAI-compatible API over HTTP. Knows the engine through its bridge only."""
