"""Evaluation and batch prediction on many processes or machines: shards of whole batches, computed by workers."""
