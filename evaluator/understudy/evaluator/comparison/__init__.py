"""Compares versions on the same batches, with confidence intervals."""
