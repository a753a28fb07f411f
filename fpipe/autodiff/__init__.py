"""A stage's forward and backward: prepare, forward, backward, backward_input, backward_weight."""
