"""CS-Drafting: drafters that review each other."""
