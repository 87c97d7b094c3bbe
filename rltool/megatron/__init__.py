"""The Megatron-core side: runtime (device, process groups, versions), model, weights, optimizer, one training step."""
