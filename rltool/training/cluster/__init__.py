"""Ray, placement, GPUs of this host, engines that the run starts itself."""
