"""Adapters to programs that show runs: a file for each, with a class Tracker (training/trackers.py), imported when asked for."""
