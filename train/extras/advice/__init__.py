"""The cost of a training, and the saving by growth: forecasts, races of methods, and sweeps."""
