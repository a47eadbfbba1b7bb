"""Training scripts for the bundled models and the drafters."""
