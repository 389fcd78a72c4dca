"""The life of checkpoints in the evaluator: discovered, loaded, scored, promoted, let go."""
