"""Scores streams and datasets, and compares versions."""
