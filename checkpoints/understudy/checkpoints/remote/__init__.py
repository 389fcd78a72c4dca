"""Checkpoints on remote storage: S3, and the file systems of TensorFlow such as ``gs://``."""
