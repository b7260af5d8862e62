"""What two or more services need: a light floor (no torch) and a heavy floor (KV pool, transports,
engine)."""
