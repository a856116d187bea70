"""HTTP server of one engine: OpenAI's API, streaming or not, and routes for routers and monitors."""
