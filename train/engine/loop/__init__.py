"""Running a plan: what a step is given, the step, and what happens every so many of them."""
