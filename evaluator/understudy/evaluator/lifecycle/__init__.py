"""The life of checkpoints in the evaluator: discovered, loaded, scored, put on stage, let go."""
