"""Training of drafters for a target of the user's: GLIDE, EAGLE-3 and tables of bigrams."""
