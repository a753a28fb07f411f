"""The Pipeline tab: the TensorBoard plugin and the page that it serves. No torch."""
