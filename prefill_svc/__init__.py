"""The prefill worker: computes prompts into KV blocks and leases them to decode workers."""
