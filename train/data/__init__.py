"""Text and image data, from files to batches."""
