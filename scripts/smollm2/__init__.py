"""The draft models shipped for SmolLM2."""
