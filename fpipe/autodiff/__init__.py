"""A stage as pieces: prepare, forward, backward, backward_input, backward_weight."""
