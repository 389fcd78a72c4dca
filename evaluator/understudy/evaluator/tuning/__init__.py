"""Finds the settings that suit a model and a machine: the trial, the choice, and what is remembered of it."""
