"""The decode worker: fetches prompts' KV blocks and generates the tokens, continuously batched."""
