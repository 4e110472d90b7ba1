"""The HTTP server: OpenAI's API over an engine in a process of its own."""
