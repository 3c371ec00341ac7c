"""What can be known of a run before its machine is there: every program of its plan, compiled for the machine, and read."""
