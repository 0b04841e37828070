"""Measurements of what the engine does: acceptance, exactness, speed."""
