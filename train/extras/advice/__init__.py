"""What does it cost to train, and is growing worth it? Forecasts, races of methods, and sweeps."""
