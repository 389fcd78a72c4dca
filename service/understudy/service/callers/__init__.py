"""Who may call what, and how much: the callers of a file, their tokens, certificates and limits."""
