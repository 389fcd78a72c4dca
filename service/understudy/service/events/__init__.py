"""Delivers events about checkpoints to webhooks and exporters."""
