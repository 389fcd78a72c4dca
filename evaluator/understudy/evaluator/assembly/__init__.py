"""Builds an evaluator: what the settings mean for its components, and how they are started and closed."""
