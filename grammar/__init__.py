"""Constraints on what a text may become: one file a backend."""
