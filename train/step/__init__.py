"""The training loop: inputs of a step, the step itself, and periodic logging and evaluation."""
