"""What speculation costs and brings: formulas, measured costs, schedules, tuned settings."""
