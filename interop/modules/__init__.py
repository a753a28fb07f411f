"""Stages made of torch.nn modules: functions, their tensors by name, and the modules back."""
