"""Token trees over any draft model."""
