"""Says what the objectives of a trainer measure, and what they count."""
