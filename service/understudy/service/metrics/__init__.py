"""What the service counts and measures, in Prometheus' terms."""
