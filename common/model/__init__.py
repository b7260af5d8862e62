"""The model: folders and where they come from, transformers' code with our attention and kernels,
sampling."""
