"""Measurements of a step while it runs: traces, profiles, and what the process used."""
