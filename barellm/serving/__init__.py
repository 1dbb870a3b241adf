"""`barellm serve`: texts for many clients at a time."""
