"""Ray, placement, devices, GPUs of this host, engines that the run starts itself."""
