"""The page: what is served and why, the scores of the checkpoints over steps, and the traffic, for a browser."""
