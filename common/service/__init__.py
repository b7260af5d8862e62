"""A worker process around one engine: links to routers, the engine's thread, heartbeats, drain."""
