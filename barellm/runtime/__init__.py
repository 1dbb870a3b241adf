"""What every backend shares."""
