"""The classifier and its losses."""
