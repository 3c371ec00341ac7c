"""The state that training changes: models, optimizer state, and their placement on devices."""
