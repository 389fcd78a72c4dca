"""Side-by-side measurements of the service, the floor it stands on, and other servers."""
