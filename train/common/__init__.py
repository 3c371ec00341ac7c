"""What do all commands share? Errors, small files, and the look of the command lines."""
