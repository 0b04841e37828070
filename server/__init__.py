"""HTTP and nothing else: OpenAI's API in front of the engine, which it knows only through `bridge`."""
