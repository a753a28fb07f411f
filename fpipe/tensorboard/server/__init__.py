"""The Pipeline tab: TensorBoard's plugin, and the page that it serves. No torch."""
