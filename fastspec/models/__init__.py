"""Running models: loading, paged caches, layouts of forward passes, CUDA graphs."""
