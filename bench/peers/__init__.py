"""Other servers that ``compare`` can start beside pagerelay, with the same weights.

``llamacpp``   llama.cpp's own HTTP server, out of the package ``xllamacpp``
``f32_gguf``   makes the file it needs: the default model's weights in fp32, equal to ours bit for bit

The packages of the peers are the extra ``peers``; nothing of pagerelay imports them.
"""
