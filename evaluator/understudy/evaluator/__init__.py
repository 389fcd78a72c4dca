"""The evaluator: watches checkpoints, loads them onto replicas, scores them, and serves the one on stage.

Knows neither gRPC nor Prometheus. TensorFlow is imported when an `Evaluator` is started, not before.
"""
