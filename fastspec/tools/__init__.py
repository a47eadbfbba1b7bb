"""What is built on the engine: measuring, tuning, simulating, published entry points."""
