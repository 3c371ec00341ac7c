"""Engine: run the phases of a plan and write their results to disk."""
