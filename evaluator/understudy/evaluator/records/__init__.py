"""The evaluator's records: the ledger, the published results, the summaries for TensorBoard."""
