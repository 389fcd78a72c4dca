"""Servers that follow an evaluator over the network: what they call, and the connection with which they follow."""
