"""Which helpers do all commands share? Errors, small files, and command-line parsers."""
