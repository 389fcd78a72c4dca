"""Loads models onto the replicas, and runs and scores them there."""
