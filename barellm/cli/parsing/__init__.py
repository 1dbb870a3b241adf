"""What all commands share of reading a command line: options, the configuration they mean, and the pages of --help."""
