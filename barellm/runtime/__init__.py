"""The part of a backend that all backends share."""
