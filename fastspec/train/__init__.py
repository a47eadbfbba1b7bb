"""Training drafters for any target: GLIDE, EAGLE-3, plain draft models and bigram tables."""
