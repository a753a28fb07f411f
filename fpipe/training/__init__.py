"""The functions of a training loop: gradients, norms, and a whole step with its update."""
