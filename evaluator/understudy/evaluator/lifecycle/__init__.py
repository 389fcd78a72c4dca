"""The life cycle of checkpoints in the evaluator: discovered, loaded, scored, promoted, released."""
