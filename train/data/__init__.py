"""Text and images, made into batches."""
