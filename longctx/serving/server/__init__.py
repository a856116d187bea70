"""HTTP over one engine: OpenAI's API, streaming and not, and what routers and monitors ask of a server."""
