"""The exporters of this project, each an entry point of its own; nothing imports them."""
