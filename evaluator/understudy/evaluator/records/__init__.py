"""What the evaluator writes down: the ledger, the published results, the summaries for TensorBoard."""
