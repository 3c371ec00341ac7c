"""What training changes: models, and their optimizer."""
