"""Compares versions on the same batches, and tells a difference from noise."""
