"""The paged KV cache: block ids and their holders, the prefix cache, and the pool's bytes."""
