"""Guesses of what comes next: one file a method. They change speed, never text."""
