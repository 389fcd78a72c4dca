"""Queues the work of requests and runs it on the devices in batches."""
