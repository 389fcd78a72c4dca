"""Checkpoints on remote storage: S3, Google Cloud Storage, and the file systems of TensorFlow."""
