"""What is done with a sample of the live requests: the request log and the monitor of drift."""
