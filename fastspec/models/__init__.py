"""Models as the engine runs them: loading, paged caches, layouts of passes, CUDA graphs."""
